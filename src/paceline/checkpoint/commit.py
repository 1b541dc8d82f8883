"""CheckpointFolder a run's checkpoints, and removes those that need not be kept.

The steps of a save, each durable before the next begins:

1. `.tmp-step-...` is made, every file written, hashed and fsynced, then the folder.
2. A former checkpoint of the same step is moved aside: to `.replaced-step-...` if it is whole, else to
`corrupt-step-...`. Every file is checked once more: one that was removed meanwhile fails the save.
3. One rename gives the new folder its name; that instant is the commit. Then the parent is fsynced.
4. What is no longer to be kept is renamed to `.trash-...`, then removed.

If killed before 3, the run has its former checkpoints; if killed after it, the new one too. No name that
counts as a checkpoint ever holds half of one. The next save removes what a killed process leaves behind; it
holds the lock, so it knows that no other process is writing there.

One process, rank 0, holds the lock and commits; a save decides who writes which files into
the temporary folder. No function here calls a collective.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint import files
from paceline.checkpoint.folder_names import (
    CHECKPOINTS,
    LOCK,
    REPLACED,
    TMP,
    TRASH,
    list_checkpoints,
    step_name,
)
from paceline.checkpoint.generation import newest_generation
from paceline.checkpoint.hashed import FileRecord, HashedFile
from paceline.checkpoint.manifest import (
    FILE_NAME,
    BadManifestError,
    Manifest,
    OtherFormatError,
    dump_manifest,
    read_manifest,
)
from paceline.checkpoint.validity import check_fits, is_usable, refuse_other_format, verify
from paceline.errors import PacelineError
from paceline.units import format_bytes

logger = logging.getLogger(__name__)

# The lock file excludes other processes, this one other threads.
_saving = threading.Lock()


class CheckpointFolder:
    """The checkpoints of one run as seen by those who write them; works without torch.

    Args:
        run_folder: the run's folder; made at the first save.
        keep: how many valid checkpoints stay, at least 1.
        generation: number of the start that writes; None: any start may commit (`generation.py`).
        best: step of a checkpoint that stays beside them.
        check: raises if the folder is no longer the run's; called by each save before it writes.
    """

    def __init__(
        self,
        run_folder: str | Path,
        keep: int,
        generation: int | None = None,
        best: int | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        assert keep >= 1
        self.check = check or (lambda: None)
        self._best = best
        self.path = Path(run_folder) / CHECKPOINTS
        self.keep = keep
        self.generation = generation
        # For each folder, its state when all of its hashes were right.
        self._seen_valid: dict[Path, object] = {}

    def steps(self) -> dict[int, Path]:
        """Return the checkpoints by rising step, valid or not."""
        return list_checkpoints(self.path)

    def list_runs(self) -> dict[Path, str]:
        """Return the id of the run that wrote each checkpoint, if its manifest is readable and has one."""
        found = {}
        for path in self.steps().values():
            with contextlib.suppress(BadManifestError, OtherFormatError):
                run = read_manifest(path).identity.get("run")
                if isinstance(run, str):
                    found[path] = run
        return found

    def begin(self, step: int, *, num_bytes: int, identity: dict[str, Any], token: str = "") -> Save:
        """Lock the folder and make a temporary one, into which any number of processes may write.

        Args:
            step: optimizer steps taken.
            num_bytes: about how many bytes will be written, for messages.
            identity: of `describe_identity`; whatever else is in it must be fit for JSON.
            token: as in `name_temporary`.

        Returns:
            The save, to be used in a `with` block: left without `commit`, nothing of it stays.
        """
        assert step >= 0
        json.dumps(identity)  # A TypeError is the caller's mistake, and better raised before the save begins.
        return Save(self, step, num_bytes, identity, token or f"{os.getpid()}-{secrets.token_hex(4)}")

    def name_temporary(self, step: int, token: str) -> Path:
        """Return the temporary folder of a save, whose token no other save has."""
        return self.path / f"{TMP}{step_name(step)}-{token}"

    @contextlib.contextmanager
    def explained(self, step: int, num_bytes: int) -> Iterator[None]:
        """Convert the file system's errors during a save into ours.

        Args:
            step: that is saved.
            num_bytes: about how many bytes it takes.
        """
        try:
            yield
        except files.BusyError:
            raise self.busy_error() from None
        except OSError as error:
            self.refuse_older()
            raise save_failed_error(step, self.path, num_bytes, error) from error

    def refuse_older(self) -> None:
        """Raise if a newer start of the run has begun; call it behind making a temporary folder."""
        newest = 0 if self.generation is None else newest_generation(self.path.parent)
        if self.generation is not None and newest > self.generation:
            raise PacelineError(
                "PL383",
                saw=f"Start {newest} of the run in {self.path.parent} has begun; this one is number "
                f"{self.generation}.",
                rule="An older start commits no checkpoint after a newer one has begun, so that the run has "
                "one history.",
                fix="End this start, or the newer one. Nodes that were cut off end on their own when the "
                "network is back.",
            )

    def busy_error(self) -> PacelineError:
        """Return the error of a folder that another process holds."""
        return PacelineError(
            "PL510",
            saw=f"Another process is saving a checkpoint in {self.path}.",
            rule="Two runs cannot share a folder: each would delete the other's checkpoints.",
            fix="Stop the other run, or give this one another --out.",
        )

    def seal(self, tmp: Path, manifest: Manifest) -> None:
        """Write the manifest into a temporary folder, and make the folder durable."""
        with HashedFile(tmp / FILE_NAME) as file:
            file.write(dump_manifest(manifest))
        files.sync_folder(tmp)

    def publish(self, step: int, tmp: Path, manifest: Manifest) -> Path:
        """Check a sealed folder once more, and give it its final name."""
        final = self.path / step_name(step)
        aside: Path | None = None
        try:
            aside = self._make_room(final)
            findings = verify(tmp, read_all=False) or check_fits(tmp)
            if not is_usable(findings):
                raise OSError(errno.EIO, findings[0].saw)
            self.refuse_older()
            files.rename(tmp, final)
        except BaseException:
            if aside is not None and not final.exists():
                with contextlib.suppress(OSError):
                    files.rename(aside, final)
            raise
        files.sync_folder(self.path)
        if aside is not None and aside.name.startswith(REPLACED):
            self._discard(aside)
        self._seen_valid[final] = note_state(final)
        return final

    def _make_room(self, final: Path) -> Path | None:
        """Move a former checkpoint of the same step aside, and return its new name."""
        replaced = final.with_name(REPLACED + final.name)
        if not final.exists():
            return None
        if replaced.exists():  # Only without locks, so nothing was cleared.
            self._discard(replaced)
        findings = verify(final)
        refuse_other_format(findings)
        if is_usable(findings):
            files.rename(final, replaced)
            return replaced
        corrupt, count = final.with_name(f"corrupt-{final.name}"), 1
        while corrupt.exists():
            count += 1
            corrupt = final.with_name(f"corrupt-{final.name}-{count}")
        files.rename(final, corrupt)
        logger.warning("%s was not valid (%s) and is now %s", final, findings[0].saw, corrupt.name)
        return corrupt

    def clear_leftovers(self, own: Path) -> None:
        """Remove what killed processes left; only under the lock, so that no other process writes here.

        Args:
            own: the temporary folder of this save, which stays: another rank may have made it.
        """
        for entry in sorted(self.path.iterdir()):
            if entry == own:
                continue
            if entry.name.startswith((TMP, TRASH)):
                self._remove(entry)
            elif entry.name.startswith(REPLACED):
                final = entry.with_name(entry.name.removeprefix(REPLACED))
                if final.exists():
                    self._discard(entry)
                else:
                    files.rename(entry, final)

    def let_go(self, saved: int) -> None:
        """Remove checkpoints beyond the newest `keep` valid ones; never the one just saved or the best.

        Those of later steps (left from before a fall-back) count only if every hash is right, so that a
        broken one cannot displace the newest valid one. For older ones the manifest and the sizes suffice,
        because the one just saved is newer and known to be whole. A broken one never counts.
        """
        try:
            self._let_go(saved)
        except OSError as error:  # The save itself is done.
            logger.warning("old checkpoints in %s cannot be removed: %s", self.path, error)

    def _let_go(self, saved: int) -> None:
        num_valid = 0
        for step, path in reversed(self.steps().items()):
            if num_valid >= self.keep and step not in (saved, self._best):
                self._discard(path)
            elif step == saved:
                num_valid += 1
            elif step < saved:
                num_valid += is_usable(verify(path, read_all=False))
            else:
                num_valid += self._is_valid(path)

    def _is_valid(self, path: Path) -> bool:
        look = note_state(path)
        if self._seen_valid.get(path) == look:
            return True
        valid = is_usable(verify(path))
        if valid:
            self._seen_valid[path] = look
        return valid

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint without ever leaving a part of it that could be mistaken for one."""
        self._seen_valid.pop(path, None)
        trash = path.with_name(f"{TRASH}{path.name.removeprefix('.')}-{secrets.token_hex(4)}")
        try:
            files.rename(path, trash)
            files.sync_folder(self.path)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", path, error)
            return
        self._remove(trash)

    def _remove(self, path: Path) -> None:
        """Remove a hidden leftover; a failure is harmless, because the next save tries again."""
        try:
            files.remove(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("%s cannot be removed: %s", path, error)


class Save:
    """A save in progress: it holds the folder's lock and a temporary folder until its `with` block ends.

    Args:
        step: optimizer steps taken.
        num_bytes: about how many bytes will be written.

    Attributes:
        folder: the temporary folder, once the block is entered.
    """

    def __init__(
        self, checkpoints: CheckpointFolder, step: int, num_bytes: int, identity: dict[str, Any], token: str
    ) -> None:
        self._checkpoints = checkpoints
        self._step = step
        self._num_bytes = num_bytes
        self._identity = identity
        self._held = contextlib.ExitStack()
        self.folder = checkpoints.name_temporary(step, token)

    def __enter__(self) -> Save:
        with contextlib.ExitStack() as held:
            held.enter_context(self._checkpoints.explained(self._step, self._num_bytes))
            held.enter_context(_saving)
            self._checkpoints.check()
            files.make_folder(self._checkpoints.path)
            has_lock = held.enter_context(files.lock(self._checkpoints.path / LOCK))
            if has_lock:
                self._checkpoints.clear_leftovers(self.folder)
            held.callback(self._clear_up)
            files.make_folder(self.folder)
            self._checkpoints.refuse_older()
            self._held = held.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._held.__exit__(*error)

    def commit(self, records: Mapping[str, FileRecord]) -> Path:
        """Rename the durable checkpoint to its final name, then remove old checkpoints.

        Args:
            records: of all files, by name.

        Returns:
            The checkpoint's folder.
        """
        manifest = Manifest(self._step, dict(records), self._identity)
        self._checkpoints.seal(self.folder, manifest)
        path = self._checkpoints.publish(self._step, self.folder, manifest)
        self._checkpoints.let_go(self._step)
        return path

    def _clear_up(self) -> None:
        if self.folder.exists():
            self._checkpoints._remove(self.folder)


def note_state(path: Path) -> object:
    """Return a folder's state without reading its files: their names, sizes and times."""
    stats = [(entry.name, entry.stat()) for entry in sorted(path.iterdir())]
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]


def save_failed_error(step: int, folder: Path, num_bytes: int, error: OSError) -> PacelineError:
    """Return PL508 for an error of the file system while a step was saved."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = f", {format_bytes(files.free_bytes(folder))} free"
        except OSError:
            free = ""
        saw = f"The disk is full: step {step} needs {format_bytes(num_bytes)} in {folder}{free}."
        fix = "Free space, lower checkpoint.keep, or choose an --out on another disk."
    else:
        saw = f"Saving step {step} in {folder} failed: {error}."
        fix = (
            "Correct the cause (permissions, a disk that does not answer, a program that removes files "
            "there), or choose another --out."
        )
    rule = "A checkpoint is complete or absent; earlier checkpoints are unchanged."
    return PacelineError("PL508", saw=saw, rule=rule, fix=fix)
