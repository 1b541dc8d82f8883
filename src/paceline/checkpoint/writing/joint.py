"""A save that several writers make together: they exchange files, never messages.

    .tmp-step-00000050-TOKEN/        the checkpoint's files, each made by one writer
    .saving-step-00000050-TOKEN/
        alive-00003                  held locked and rewritten by writer 3 while it works (`alive.py`)
        left-00003                   its name once writer 3 has left
        record-00003.json            sizes and hashes of its files, once these are durable, and digests of
                                     the tensors that other ranks hold too
        outcome.json                 what became of the save

1. Each writer makes both folders, if they are missing, and its `alive` file.
2. It writes its files, makes them durable and leaves its record.
3. All writers look for the records of the others. Any of them that sees all records takes the folder's lock
   and commits, unless another one has. If the ranks' digests differ (PL418), nothing is committed. The
   outcome is written under the same lock, so there is only one.
4. A writer that fails writes the outcome instead. One that dies releases its lock: if it left no record, the
   others end the save. If it died later, they finish what it began.
5. A writer that stands still, because it or its disk does, rewrites its file no more: that ends the save too.
   Where another's lock was never seen, only this shows that it lives, and the first writer alone commits.

So a save is committed once every share is in a writer's hands, even if all ranks are dead by then.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import files
from paceline.checkpoint.alive import Hold, alive_name, is_held, read_sign, shares_locks
from paceline.checkpoint.commit import Commits
from paceline.checkpoint.hashed import FileRecord, HashedFile
from paceline.checkpoint.manifest import (
    FILE_NAME,
    BadManifestError,
    Manifest,
    NewerFormatError,
    read_manifest,
)
from paceline.checkpoint.names import LOCK, SAVING, TMP, step_name
from paceline.checkpoint.same_copies import Digests, find_difference
from paceline.errors import PacelineError

_OUTCOME = "outcome.json"
# How often a writer looks for the records of the others: at first, and after a second.
_QUICK_POLL_S, _SLOW_POLL_S = 0.01, 0.05
# How long the folder's lock may be held by a process that is not one of the writers.
_LOCKED_S = 60.0
# How long to wait for a writer without a visible file (a shared disk may show it late), and for one whose
# file is not locked (it may be about to lock it).
_APPEARS_S, _LOCKS_S = 10.0, 2.0
# How long a file stays as it is before its writer counts as ended, where locks cannot be seen, and as
# standing still, where it is locked. A busy disk may take seconds for the few bytes.
_SILENT_S, STILL_S = 30.0, 60.0
_PAUSED_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a save.

    Attributes:
        path: of the checkpoint, if it was committed.
        error: why it was not.
    """

    path: Path | None = None
    error: PacelineError | None = None

    def dump(self) -> dict[str, Any]:
        """Return it as JSON."""
        error = self.error
        return {
            "path": None if self.path is None else str(self.path),
            "error": None if error is None else [error.code, error.saw, error.rule, error.fix],
        }

    @staticmethod
    def parse(table: Any) -> Outcome:
        """Return the result of `dump`."""
        if table["error"] is None:
            return Outcome(path=Path(table["path"]))
        code, saw, rule, fix = table["error"]
        return Outcome(error=PacelineError(code, saw=saw, rule=rule, fix=fix))


@dataclass(frozen=True)
class Order:
    """One writer's part of a save; JSON-able.

    Attributes:
        folder: of the run.
        keep: checkpoints to keep.
        step: optimizer steps taken.
        token: of this save; the same for all writers, and for no other save.
        writer: this one's number.
        writers: of all.
        content: name of the content.
        identity: for the manifest.
        num_bytes: of all writers' files together, about.
        files: name, first byte in the memory and number of bytes.
    """

    folder: str
    keep: int
    step: int
    token: str
    writer: int
    writers: Sequence[int]
    content: str
    identity: dict[str, Any]
    num_bytes: int
    files: Sequence[tuple[str, int, int]]


Read = Callable[[int, int], Iterable[memoryview]]


class JointSave:
    """One writer's side of a save that several writers make.

    Args:
        order: what to write.
        on_beat: called every few seconds, as long as the disk does what it is asked.

    Attributes:
        doing: what it does at the moment.
    """

    def __init__(self, order: Order, on_beat: Callable[[], None] = lambda: None) -> None:
        self._order = order
        self._on_beat = on_beat
        self.doing = "nothing yet"
        generation = order.identity.get("generation")
        self._commits = Commits(order.folder, order.keep, generation)
        name = f"{step_name(order.step)}-{order.token}"
        self._temporary = self._commits.path / f"{TMP}{name}"
        self._saving = self._commits.path / f"{SAVING}{name}"
        self._alive: Hold | None = None
        # By writer: what its file last held, and since when; those whose lock was seen.
        self._signs: dict[int, tuple[bytes, float]] = {}
        self._seen_locked = set[int]()

    def begin(self) -> None:
        """Make the folders, and show that this writer is alive.

        Raises:
            PacelineError: PL508, PL510 where another run is saving here, or PL383 where a newer start of this
                one has begun.
        """
        with self._explained():
            files.make_folder(self._commits.path)
            self._commits.refuse_other_runs(self._order.identity.get("run"), own=self._saving)
            files.make_folder(self._saving)
            own = self._saving / alive_name(self._order.writer)
            self._alive = Hold(own, self._order.identity.get("run"), self._on_beat)
            files.make_folder(self._temporary)
            self._commits.refuse_older()

    def write(self, read: Read, digests: Sequence[Digests] = ()) -> None:
        """Write this writer's files and leave the record.

        Args:
            read: from the first byte and the number of bytes to these bytes.
            digests: of this rank's tensors that other ranks hold too.

        Raises:
            PacelineError: PL508.
        """
        with self._explained():
            records = {}
            for name, start, num_bytes in self._order.files:
                self.doing = f"writing {self._temporary / name} ({num_bytes:,} bytes)"
                with HashedFile(self._temporary / name) as file:
                    for data in read(start, num_bytes):
                        file.write(data)
                records[name] = asdict(file.record)
            self.doing = f"making {self._temporary} durable"
            files.sync_folder(self._temporary)
            self._put(_record_name(self._order.writer), {"files": records, "digests": digests})

    def conclude(self) -> Outcome:
        """Wait for the other writers, and commit unless another one does."""
        self.doing = "waiting for other writers"
        began_s = free_s = looked_s = time.monotonic()
        while True:
            if time.monotonic() - looked_s > _PAUSED_S:  # this process was stopped, as others may have been
                self._signs.clear()
            looked_s = time.monotonic()
            outcome = self._read_outcome()
            if outcome is None and all(path.exists() for path in self._record_paths()) and self._may_commit():
                try:
                    outcome = self._commit()
                    free_s = time.monotonic()
                except files.BusyError:
                    if time.monotonic() - free_s > _LOCKED_S:
                        outcome = Outcome(error=self._commits.busy_error())
            elif outcome is None and (error := self._find_lost()) is not None:
                outcome = self.fail(error)
            if outcome is not None:
                return outcome
            time.sleep(_QUICK_POLL_S if time.monotonic() - began_s < 1 else _SLOW_POLL_S)

    def fail(self, error: PacelineError) -> Outcome:
        """End the save for all writers, unless it has ended; return its outcome."""
        end_s = time.monotonic() + _LOCKED_S
        while time.monotonic() < end_s:
            with suppress(files.BusyError):
                try:
                    with files.lock(self._commits.path / LOCK):
                        outcome = self._read_outcome() or self._find_committed()
                        if outcome is None:
                            outcome = Outcome(error=error)
                            self._put(_OUTCOME, outcome.dump())
                        return outcome
                except OSError:  # the others find out from this writer's lock
                    break
            time.sleep(_SLOW_POLL_S)
        return Outcome(error=error)

    def leave(self, outcome: Outcome) -> None:
        """Release what this writer holds; the last of all writers removes what is not the checkpoint.

        If one of them never comes here, the next commit removes it.
        """
        with suppress(OSError):
            if outcome.path is None:  # its place on a full disk is needed now
                for name, _, _ in self._order.files:
                    if (self._temporary / name).exists():
                        files.remove(self._temporary / name)
        if self._alive is not None:
            self._alive.close()
            self._alive = None
        with suppress(OSError):
            own = self._saving / alive_name(self._order.writer)
            files.rename(own, own.with_name(_left_name(self._order.writer)))
            if all((self._saving / _left_name(writer)).exists() for writer in self._order.writers):
                if self._temporary.exists():
                    files.remove(self._temporary)
                files.remove(self._saving)

    def _commit(self) -> Outcome | None:
        """Commit under the folder's lock, unless the save has ended; `None` where records are missing."""
        order, commits = self._order, self._commits
        with files.lock(commits.path / LOCK) as is_locked:
            outcome = self._read_outcome() or self._find_committed()
            if outcome is not None:
                return outcome
            read = self._read_records()
            if read is None:
                return None
            records, digests = read
            try:
                if (error := find_difference(digests)) is not None:
                    raise error
                with self._explained():
                    if is_locked:
                        commits.clear_leftovers(own=self._saving)
                    with suppress(FileNotFoundError):  # of a writer that died here
                        files.remove(self._temporary / FILE_NAME)
                    manifest = Manifest(
                        order.step, records, order.identity | {"save": order.token}, order.content
                    )
                    commits.seal(self._temporary, manifest)
                    # Ranks have compared their plans, so the parts fit; reading headers would need torch.
                    path = commits.publish(order.step, self._temporary, manifest, reads_headers=False)
                    outcome = Outcome(path=path)
            except PacelineError as error:
                outcome = Outcome(error=error)
            with suppress(OSError):
                self._put(_OUTCOME, outcome.dump())
            if outcome.path is not None:
                commits.let_go(order.step)
            return outcome

    def _find_committed(self) -> Outcome | None:
        """Return the outcome where a writer died between the commit and its note."""
        final = self._commits.path / step_name(self._order.step)
        with suppress(BadManifestError, NewerFormatError):
            if read_manifest(final).identity.get("save") == self._order.token:
                return Outcome(path=final)
        return None

    def _read_outcome(self) -> Outcome | None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return Outcome.parse(json.loads((self._saving / _OUTCOME).read_bytes()))
        return None

    def _read_records(self) -> tuple[dict[str, FileRecord], dict[int, list[Digests]]] | None:
        """Return the records of all files, and each writer's digests; `None` where some are missing."""
        found: dict[str, FileRecord] = {}
        digests = {}
        for writer, path in zip(self._order.writers, self._record_paths(), strict=True):
            try:
                record = json.loads(path.read_bytes())
                found |= {name: FileRecord(**each) for name, each in record["files"].items()}
            except (OSError, ValueError):
                return None
            digests[writer] = record["digests"]
        return found, digests

    def _record_paths(self) -> list[Path]:
        return [self._saving / _record_name(writer) for writer in self._order.writers]

    def _find_lost(self) -> PacelineError | None:
        """Return the error of a writer that has ended or stands still without a record."""
        for writer in self._order.writers:
            if writer == self._order.writer or (self._saving / _record_name(writer)).exists():
                continue
            held, silent_s = self._look_at(writer)
            if held is None:
                limit_s = _APPEARS_S
            elif held:
                limit_s = STILL_S
            else:
                limit_s = _LOCKS_S if self._sees_lock_of(writer) else _SILENT_S
            if silent_s > limit_s:
                return self._still_error(writer, silent_s) if held else self._lost_error(writer)
        return None

    def _look_at(self, writer: int) -> tuple[bool | None, float]:
        """Return whether a writer's file is locked, and for how long it has been as it is."""
        path, now_s = self._saving / alive_name(writer), time.monotonic()
        held, sign = is_held(path), read_sign(path)
        if held:
            self._seen_locked.add(writer)
        known, since_s = self._signs.get(writer, (None, now_s))
        if sign != known:
            self._signs[writer] = sign, now_s
            return held, 0.0
        return held, now_s - since_s

    def _sees_lock_of(self, writer: int) -> bool:
        return writer in self._seen_locked or shares_locks(self._signs.get(writer, (b"", 0.0))[0])

    def _may_commit(self) -> bool:
        """Return whether no other writer can commit at the same time, because locks keep it from that."""
        first = min(self._order.writers)
        if self._order.writer == first:
            return True
        _, silent_s = self._look_at(first)
        return self._sees_lock_of(first) or silent_s > _SILENT_S

    def _put(self, name: str, table: Any) -> None:
        """Write a small file that is whole as soon as it has its name."""
        part = self._saving / f".{name}-{self._order.writer}"
        with suppress(FileNotFoundError):
            part.unlink()
        with files.DurableFile(part) as file:
            file.write(json.dumps(table).encode())
        files.rename(part, self._saving / name)

    def _explained(self) -> Any:
        return self._commits.explained(self._order.step, self._order.num_bytes)

    def _still_error(self, writer: int, silent_s: float) -> PacelineError:
        return standing_still_error(
            f"The writer of rank {writer}", f"saving step {self._order.step} in {self._saving}", silent_s
        )

    def _lost_error(self, writer: int) -> PacelineError:
        return PacelineError(
            "PL540",
            saw=f"The writer of rank {writer} ended before its share of step {self._order.step} was written "
            f"(found by the writer of rank {self._order.writer} on {socket.gethostname()}, process "
            f"{os.getpid()}).",
            rule="A checkpoint is committed once the shares of all ranks are on the disk; earlier "
            "checkpoints are unchanged.",
            fix="Look for the reason in the log of that rank's node: a lack of memory, or a kill. The next "
            "save starts a new writer.",
        )


def standing_still_error(who: str, doing: str, silent_s: float) -> PacelineError:
    """Return PL549."""
    return PacelineError(
        "PL549",
        saw=f"{who} has made no progress for {silent_s:.0f} s, while {doing}.",
        rule="A save that stands still counts as failed, and training goes on; earlier checkpoints are "
        "unchanged.",
        fix="Check whether the disk answers, and whether something has stopped that process. The next save "
        "starts a new writer.",
    )


def _left_name(writer: int) -> str:
    return f"left-{writer:05d}"


def _record_name(writer: int) -> str:
    return f"record-{writer:05d}.json"
