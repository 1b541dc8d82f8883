"""A save that ranks write together: each its files, then rank 0 commits.

Each rank writes into one temporary folder and posts the hashes of its files, or its error, at the store where
the ranks have met. Rank 0 holds the folder's lock meanwhile. Once it has all posts, it compares the ranks'
digests (PL418) and commits, or ends the save. Nothing here is a collective, so a thread does it, while
training goes on or waits.

A share whose thread makes no progress is given up by the rank that waits for it, and posted as an error. The
thread may be in the kernel and cannot be ended; if the disk answers later, it neither posts nor commits.

A save that a crash interrupts is not committed; the next save removes what is left of it.
"""

from __future__ import annotations

import errno
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.checkpoint import files
from paceline.checkpoint.commit import CheckpointFolder, save_failed_error
from paceline.checkpoint.content import write_files
from paceline.checkpoint.hashed import FileRecord
from paceline.checkpoint.same_copies import Digests, find_difference
from paceline.checkpoint.tensors import FilePlan
from paceline.errors import PacelineError

# How often rank 0 asks for the posts of the others: at first, and later.
_QUICK_POLL_S, _SLOW_POLL_S = 0.01, 0.1
# How long a wait sees the same file operation until the save is given up: usually, and if the rank was asked
# to stop. A sync may take longer by its bytes, at the speed of the slowest disks.
_STILL_S, _STOPPING_STILL_S, _SLOW_BYTES_PER_S = 60.0, 10.0, 8 << 20
# How often a wait looks. It counts looks, as a clock would count time for which this process was stopped.
_LOOK_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """The outcome of a save.

    Attributes:
        path: of the checkpoint, if it was committed; only rank 0 knows.
        error: why it was not, or why this rank's share was not written.
    """

    path: Path | None = None
    error: PacelineError | None = None


@dataclass(frozen=True)
class Order:
    """A save, told to all its writers.

    Attributes:
        step: optimizer steps taken.
        token: of this save; the same for all writers, and for no other save.
        num_writers: ranks that write: all, or rank 0 alone.
        num_bytes: of all writers' files together, about.
    """

    step: int
    token: str
    num_writers: int
    identity: dict[str, Any]
    num_bytes: int


@dataclass(frozen=True)
class _Post:
    records: dict[str, FileRecord]
    digests: Sequence[Digests]
    error: PacelineError | None


class JointSave:
    """One rank's side of a save.

    Attributes:
        seconds: from the making of this object to the outcome.

    Args:
        order: what is saved.
        store: of the ranks; `None` for a single writer.
        name_rank: adds this rank to an error, for the others.
    """

    def __init__(
        self,
        commits: CheckpointFolder,
        order: Order,
        rank: int,
        store: Store | None,
        name_rank: Callable[[PacelineError], PacelineError],
    ) -> None:
        self._commits, self._order, self._rank, self._store = commits, order, rank, store
        self._name_rank = name_rank
        self.seconds = math.nan
        self._begin_s = time.monotonic()
        self._closes_s = math.inf
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._outcome = Outcome()
        self._is_given_up = False

    @property
    def stuck_error(self) -> PacelineError | None:
        """Why this save was given up, while its thread is still there: the next one must not begin."""
        is_there = self._is_given_up and self._thread is not None and self._thread.is_alive()
        return self._outcome.error if is_there else None

    def start(
        self,
        plans: Sequence[FilePlan],
        digests: Sequence[Digests] = (),
        error: PacelineError | None = None,
        niceness: int = 0,
    ) -> None:
        """Write this rank's files in a thread, and commit there on rank 0.

        Args:
            plans: the files, of tensors that do not change any more.
            digests: of this rank's tensors that other ranks hold too.
            error: why there is nothing to write.
        """

        def run() -> None:
            with suppress(OSError):
                if niceness:
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
            files.note("make", self._commits.path)
            outcome = self._run(plans, digests, error)
            if not self._is_given_up:
                self._outcome = outcome
                self.seconds = time.monotonic() - self._begin_s
            self._ended.set()

        self._thread = threading.Thread(target=run, name="paceline-save", daemon=True)
        self._thread.start()

    def wait(
        self, timeout_s: float | None = None, is_asked_to_stop: Callable[[], bool] = lambda: False
    ) -> Outcome | None:
        """Return the outcome, or `None` if it is not known in time. A save without progress is given up.

        Args:
            timeout_s: how long to wait.
            is_asked_to_stop: whether this rank was, so that there is less time.
        """
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        doing: files.FileWork | None = None
        still_s = 0.0
        while not self._ended.wait(max(0.0, min(_LOOK_S, end_s - time.monotonic()))):
            if time.monotonic() >= end_s:
                return None
            now = None if self._thread is None else files.read_activity(self._thread.ident)
            still_s, doing = still_s + _LOOK_S if now is doing else 0.0, now
            limit_s = _STOPPING_STILL_S if is_asked_to_stop() else _STILL_S
            if doing is not None and still_s >= limit_s + doing.num_bytes / _SLOW_BYTES_PER_S:
                self._give_up(doing, still_s)
        return self._outcome

    def refuse(self, error: PacelineError) -> None:
        """End this rank's side of the save by an error."""
        self._outcome = Outcome(error=error)
        self.seconds = time.monotonic() - self._begin_s
        self._post(_Post({}, (), error))
        self._ended.set()

    def close_soon(self, timeout_s: float) -> None:
        """Let rank 0 wait for the others' shares for this long from now."""
        self._closes_s = time.monotonic() + timeout_s

    def _give_up(self, doing: files.FileWork, still_s: float) -> None:
        self._is_given_up = True
        what = f"no progress for {still_s:.0f} s, since its thread began to {doing.operation}"
        order, raised = self._order, TimeoutError(errno.ETIMEDOUT, what, str(doing.path))
        error = save_failed_error(order.step, self._commits.path, order.num_bytes, raised)
        self.refuse(self._name_rank(error))

    def _run(
        self, plans: Sequence[FilePlan], digests: Sequence[Digests], error: PacelineError | None
    ) -> Outcome:
        try:
            if self._rank == 0:
                return Outcome(path=self._lead(plans, digests, error))
            post = self._write(plans, digests, error)
            if not self._is_given_up:
                self._post(post)
            return Outcome(error=post.error)
        except PacelineError as failed:
            return Outcome(error=failed)
        except Exception as failed:
            return Outcome(error=broken_error(failed))

    def _post(self, post: _Post) -> None:
        if self._rank and self._store is not None:
            self._store.set(self._key(self._rank), pickle.dumps(post))  # type: ignore[arg-type]

    def _lead(
        self, plans: Sequence[FilePlan], digests: Sequence[Digests], error: PacelineError | None
    ) -> Path:
        order, commits = self._order, self._commits
        with (
            commits.explained(order.step, order.num_bytes),
            commits.begin(
                order.step, num_bytes=order.num_bytes, identity=order.identity, token=order.token
            ) as save,
        ):
            posts = [self._write(plans, digests, error), *self._collect()]
            for post in posts:
                if post.error is not None:
                    raise post.error
            if (
                found := find_difference({rank: post.digests for rank, post in enumerate(posts)})
            ) is not None:
                raise found
            if self._is_given_up:  # what was written may have changed since
                raise self._lost_error()
            return save.commit({n: one for post in posts for n, one in post.records.items()})

    def _write(
        self, plans: Sequence[FilePlan], digests: Sequence[Digests], error: PacelineError | None
    ) -> _Post:
        records: dict[str, FileRecord] = {}
        try:
            if error is not None:
                raise error
            folder = self._commits.name_temporary(self._order.step, self._order.token)
            with self._commits.explained(self._order.step, self._order.num_bytes):
                self._commits.check()
                files.make_folder(folder)
                self._commits.refuse_older()
                records = write_files(plans, folder)
                files.sync_folder(folder)
        except PacelineError as failed:
            return _Post({}, (), self._name_rank(failed))
        except Exception as failed:
            return _Post({}, (), self._name_rank(broken_error(failed)))
        return _Post(records, digests, None)

    def _collect(self) -> list[_Post]:
        """Return the posts of the other writers, once all are there."""
        store, keys = self._store, [self._key(rank) for rank in range(1, self._order.num_writers)]
        if store is None or not keys:
            return []
        begin_s = time.monotonic()
        while not store.check(keys):
            files.note("wait", self._commits.path)  # for the others, who are judged by themselves
            if time.monotonic() > self._closes_s:
                raise self._lost_error()
            time.sleep(_QUICK_POLL_S if time.monotonic() - begin_s < 1 else _SLOW_POLL_S)
        posts = [pickle.loads(store.get(key)) for key in keys]
        for key in keys:
            store.delete_key(key)
        return posts

    def _lost_error(self) -> PacelineError:
        return PacelineError(
            "PL541",
            saw=f"A rank ended before its share of step {self._order.step} was written.",
            rule="A checkpoint is committed once the shares of all ranks are on the disk; earlier "
            "checkpoints are unchanged.",
            fix="Find out why the rank ended. The run continues from the checkpoint before.",
        )

    def _key(self, rank: int) -> str:
        return f"paceline/save/{self._order.token}/{rank}"


def broken_error(error: Exception) -> PacelineError:
    """Return PL544."""
    return PacelineError(
        "PL544",
        saw=f"Saving in the background failed ({type(error).__name__}: {error}).",
        rule="A checkpoint is committed once the shares of all ranks are on the disk; earlier ones stay.",
        fix="If memory ran out, use checkpoint.asynchronous = false. Else report it with this message.",
    )
