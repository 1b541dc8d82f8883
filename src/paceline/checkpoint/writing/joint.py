"""A save that ranks write together: each its files, then rank 0 commits.

Each rank writes into one temporary folder and posts the hashes of its files, or its error, at the store where
the ranks have met. Rank 0 holds the folder's lock meanwhile. Once it has all posts, it compares the ranks'
digests (PL418) and commits, or ends the save. Nothing here is a collective, so a thread can do it while
training goes on.

A save that a crash interrupts is not committed; the next save removes what is left of it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.checkpoint import files
from paceline.checkpoint.commit import Commits
from paceline.checkpoint.content.protocol import write_files
from paceline.checkpoint.hashed import FileRecord
from paceline.checkpoint.same_copies import Digests, find_difference
from paceline.checkpoint.tensors import FilePlan
from paceline.errors import PacelineError

# How often rank 0 asks for the posts of the others: at first, and later.
_QUICK_POLL_S, _SLOW_POLL_S = 0.01, 0.1


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
        content: name of the content.
        identity: for the manifest.
        num_bytes: of all writers' files together, about.
    """

    step: int
    token: str
    num_writers: int
    content: str
    identity: dict[str, Any]
    num_bytes: int


@dataclass(frozen=True)
class _Post:
    records: dict[str, FileRecord]
    digests: Sequence[Digests]
    error: PacelineError | None


class JointSave:
    """One rank's side of a save.

    Args:
        commits: of the run.
        order: what is saved.
        rank: this one.
        store: of the ranks; `None` for a single writer.
        name_rank: adds this rank to an error, for the others.
    """

    def __init__(
        self,
        commits: Commits,
        order: Order,
        rank: int,
        store: Store | None,
        name_rank: Callable[[PacelineError], PacelineError],
    ) -> None:
        self._commits, self._order, self._rank, self._store = commits, order, rank, store
        self._name_rank = name_rank
        self._gives_up: Callable[[], bool] = lambda: False

    def write(
        self,
        plans: Sequence[FilePlan],
        digests: Sequence[Digests] = (),
        error: PacelineError | None = None,
        gives_up: Callable[[], bool] | None = None,
    ) -> Outcome:
        """Write this rank's files, and commit on rank 0; never raises.

        Args:
            plans: the files, of tensors that do not change any more.
            digests: of this rank's tensors that other ranks hold too.
            error: why there is nothing to write.
            gives_up: whether rank 0 stops waiting for the others; by default it never does.
        """
        self._gives_up = gives_up or self._gives_up
        try:
            if self._rank == 0:
                return Outcome(path=self._lead(plans, digests, error))
            post = self._write(plans, digests, error)
            if self._store is not None:
                self._store.set(self._key(self._rank), pickle.dumps(post))  # type: ignore[arg-type]
            return Outcome(error=post.error)
        except PacelineError as failed:
            return Outcome(error=failed)
        except Exception as failed:
            return Outcome(error=broken_error(failed))

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
            return save.commit(order.content, {n: one for post in posts for n, one in post.records.items()})

    def _write(
        self, plans: Sequence[FilePlan], digests: Sequence[Digests], error: PacelineError | None
    ) -> _Post:
        records: dict[str, FileRecord] = {}
        try:
            if error is not None:
                raise error
            folder = self._commits.name_temporary(self._order.step, self._order.token)
            with self._commits.explained(self._order.step, self._order.num_bytes):
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
            if self._gives_up():
                raise PacelineError(
                    "PL541",
                    saw=f"A rank ended before its share of step {self._order.step} was written.",
                    rule="A checkpoint is committed once the shares of all ranks are on the disk; earlier "
                    "checkpoints are unchanged.",
                    fix="Find out why the rank ended. The run continues from the checkpoint before.",
                )
            time.sleep(_QUICK_POLL_S if time.monotonic() - begin_s < 1 else _SLOW_POLL_S)
        posts = [pickle.loads(store.get(key)) for key in keys]
        for key in keys:
            store.delete_key(key)
        return posts

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
