"""Makes saves, in the call or in the background, and decides what happens if they fail.

A save, on every rank:

1. Wait for the outcome of the save before: there is memory for one copy.
2. Prepare this rank's files, and exchange in one collective: errors, the inputs of the plan, the outcome of
   the save before, and rank 0's name for this one.
3. Write the files; rank 0 commits once all ranks have written (`checkpoint/writing/joint.py`).

In the background, 3 begins with a copy. Headers and what may change are copied at once, the rest by a thread
(`checkpoint/writing/state_copy.py`), and another thread writes. Training goes on; before an optimizer's step,
and whatever else may change weights, `before_write` waits for the copy.

A failing disk does not end training: the failure is reported, the next save tries again, and only
`max_failed` failures in a row raise PL508. A save whose files make no progress counts as failed. While its
thread is still there, each save after it fails at once, and is not counted.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import CheckpointFolder
from paceline.checkpoint.content import PreparedShare
from paceline.checkpoint.folder_names import step_name
from paceline.checkpoint.writing.joint import JointSave, Order, Outcome
from paceline.errors import PacelineError
from paceline.torch_seams.groups import find_store
from paceline.train.disk_thread import WAIT_S, DiskThread
from paceline.train.state.background import Background
from paceline.train.state.transfer import gather, name_rank
from paceline.train.state.write import (
    RunState,
    agree,
    caught,
    prepare_full,
    prepare_share,
)
from paceline.train.step import SaveTimes
from paceline.world import World

log = logging.getLogger(__name__)

# How long rank 0 waits at its end for the shares of other ranks, which may have died.
_CLOSING_S = 30.0
# Failures that the next save would repeat: another run saves here, a newer start of this one has begun, the
# ranks' copies differ, or the folder is gone.
_FATAL = ("PL510", "PL383", "PL418", "PL522")


class SaveHandle(os.PathLike[str]):
    """A checkpoint that is being saved, or has been.

    Attributes:
        step: of the checkpoint.
        path: the checkpoint's folder, which is there once the save is committed.
    """

    def __init__(self, saving: Saving, step: int, path: Path, on_commit: Callable[[int], None]) -> None:
        self.step = step
        self.path = path
        self.outcome: Outcome | None = None
        self.on_commit = on_commit
        self.is_told = False
        self._saving = saving

    def __repr__(self) -> str:
        state = "being saved" if self.outcome is None else "failed" if self.failed else "saved"
        return f"SaveHandle(step {self.step}, {state}: {self.path})"

    @property
    def failed(self) -> bool:
        """Whether the save is known to have failed."""
        return self.outcome is not None and self.outcome.error is not None

    def wait(self) -> Path:
        """Wait until the checkpoint is committed, and return its folder; collective.

        Raises:
            PacelineError: PL508 or another error of the save; earlier checkpoints are kept.
        """
        self._saving.finish(self)
        assert self.outcome is not None
        if self.outcome.error is not None:
            raise self.outcome.error
        return self.path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class _Entry:
    """A rank's message in the collective of a save.

    Attributes:
        error: its error in preparing the save.
        digest: of the inputs of the plan.
        outcome: of the save before, as far as this rank knows.
        why_not: why this rank cannot save in the background, or "".
        token: for the names of this save; rank 0's counts.
        identity: for the manifest; rank 0's counts.
    """

    error: PacelineError | None
    digest: str
    outcome: Outcome | None
    why_not: str
    token: str
    identity: dict[str, Any]


class Saving:
    """The saves of a trainer. All methods but `before_write`, `end_step` and `close` are collective.

    Attributes:
        is_sharded: whether every rank writes its share; else rank 0 writes all.
        background: of this rank, if saves are asynchronous.

    Args:
        is_sharded: see above.
        asynchronous: whether saves are made in the background.
        max_failed: failed saves in a row that raise PL508.
        is_asked_to_stop: whether this rank was asked to stop, so that there is less time for a save.
    """

    def __init__(
        self,
        world: World,
        is_sharded: bool,
        asynchronous: bool,
        max_failed: int,
        is_asked_to_stop: Callable[[], bool],
    ) -> None:
        self.background = Background(world.device) if asynchronous else None
        self._world = world
        self.is_sharded = is_sharded
        self._max_failed = max_failed
        self._num_failed, self._last_error = 0, ""
        self._pending: SaveHandle | None = None
        # Of the pending save, as this rank knows it; unless sharded, only rank 0 writes.
        self._outcome: Outcome | None = None
        self._is_writing = False
        # The last save in which this rank writes, and one that was given up, until its thread has ended.
        self._joint: JointSave | None = None
        self._stuck: JointSave | None = None
        self._is_asked_to_stop = is_asked_to_stop
        self._has_told_why_not = False
        self._begin_s = 0.0
        self._stall_s: float | None = None
        self._save_s: float | None = None

    def start(self) -> None:
        """Get ready for saves into a run's folder."""
        if self._pending is not None:
            self.finish(self._pending)

    def get_ready(self, list_state: Callable[[], RunState]) -> None:
        """Reserve memory for saves in the background, in their thread; collective.

        Without it, the first save would make training wait for all pages of its memory.

        Args:
            list_state: returns this rank's part of the state.
        """
        if self.background is None:
            return
        with caught():  # a save raises it
            state = list_state()
            if self.is_sharded:
                self.background.reserve(prepare_share(self._world.rank, state)[0].list_files())
            elif not state.parts.is_divided and self._world.is_main:  # else whole tensors would be gathered
                prepared = prepare_full(self._world, state)
                assert prepared is not None
                self.background.reserve(prepared.list_files())

    def save(
        self,
        folder: CheckpointFolder,
        step: int,
        state: RunState,
        identity: dict[str, Any],
        on_commit: Callable[[int], None],
    ) -> SaveHandle:
        """Save in the background, or now.

        Args:
            step: optimizer steps taken.
            on_commit: called with the step once the save is known to be committed.
        """
        self._begin_s = begin_s = time.perf_counter()
        handle = SaveHandle(self, step, folder.path.absolute() / step_name(step), on_commit)
        try:
            self._save(folder, handle, state, identity)
        finally:
            self._add_stall(begin_s)
        return handle

    def finish(self, handle: SaveHandle) -> None:
        """Wait for the outcome of a save; raises nothing of the save's own."""
        if handle.outcome is not None:
            return
        if handle is not self._pending:  # the trainer was closed, and only rank 0 knows
            found, disk = list[bool](), DiskThread()
            disk.begin(lambda: found.append(handle.path.exists()))
            there = disk.wait(WAIT_S) and found[0]
            handle.outcome = Outcome(path=handle.path) if there else Outcome(error=_closed_error(handle))
            return
        begin_s = time.perf_counter()
        outcome = gather(self._world, self._receive(None))[0]
        assert outcome is not None  # rank 0 always writes
        self._settle(handle, outcome)
        self._add_stall(begin_s)

    def before_write(self) -> None:
        """Wait until weights, optimizer state and buffers may be written to."""
        if self._pending is not None and self._is_writing:
            assert self.background is not None
            begin_s = time.perf_counter()
            self.background.wait_for_copy()
            self._add_stall(begin_s)

    def end_step(self) -> None:
        """Wait for the copy of a save under way."""
        self.before_write()
        if self._pending is not None:
            self._receive(0.0)
            if self._outcome is not None and self._outcome.error is not None:
                self._tell(self._pending, self._outcome.error, self._num_failed + 1)

    def take_times(self) -> SaveTimes:
        """Return what saves have cost since last asked."""
        found = SaveTimes(self._stall_s, self._save_s)
        self._stall_s = self._save_s = None
        return found

    def close(self) -> None:
        """Wait until this rank's share is written; only `start` may be called afterwards."""
        if self.background is not None:
            if self._joint is not None:
                self._joint.close_soon(_CLOSING_S)
            self._receive(None)
            self.background.close()
            handle, outcome = self._pending, self._outcome
            if handle is not None and outcome is not None and self._world.is_main:
                handle.outcome = outcome
                if outcome.error is None:
                    handle.on_commit(handle.step)
                else:
                    self._tell(handle, outcome.error, self._num_failed + 1)
        self._pending, self._outcome, self._is_writing = None, None, False

    def _save(
        self, folder: CheckpointFolder, handle: SaveHandle, state: RunState, identity: dict[str, Any]
    ) -> None:
        background = self.background
        if background is None or not self.is_sharded:
            state.check_copies()
        self._receive(None)
        prepared: PreparedShare | None = None
        digest = why_not = ""
        with caught() as raised:
            if self.is_sharded:
                prepared, digest = prepare_share(self._world.rank, state)
            else:
                prepared = prepare_full(self._world, state)
        plans = [] if prepared is None else prepared.list_files()
        if background is not None and prepared is not None and raised.error is None:
            why_not = background.get_ready(plans)
        own = _Entry(raised.error, digest, self._outcome, why_not, secrets.token_hex(4), identity)
        entries = gather(self._world, own)
        if self._pending is not None:
            outcome = entries[0].outcome
            assert outcome is not None
            self._settle(self._pending, outcome)
        agree([(entry.error, entry.digest) for entry in entries])
        reasons = [f"rank {rank}: {entry.why_not}" for rank, entry in enumerate(entries) if entry.why_not]
        if background is not None and reasons:
            self._tell_why_not(f"the state cannot be copied into memory ({reasons[0]})")
            if self.is_sharded:
                state.check_copies()
            background = None
        save = None
        if prepared is not None:
            order = Order(
                step=handle.step,
                token=entries[0].token,
                num_writers=self._world.world_size if self.is_sharded else 1,
                identity=entries[0].identity,
                num_bytes=prepared.num_bytes,
            )
            store = find_store() if order.num_writers > 1 else None
            save = JointSave(folder, order, self._world.rank, store, partial(name_rank, self._world))
        self._joint, self._outcome, self._is_writing = save, None, save is not None
        stuck = None if self._stuck is None else self._stuck.stuck_error
        if save is not None and stuck is not None:
            save.refuse(stuck)
        elif save is not None and background is None:
            if self._world.device.type == "cuda":
                torch.cuda.current_stream(self._world.device).synchronize()  # the thread has another one
            save.start(plans)
        if background is None:
            outcome = gather(self._world, self._receive(None))[0]
            assert outcome is not None  # rank 0 always writes
            self._end_now(handle, outcome)
            return
        self._pending = handle
        if save is not None and prepared is not None and stuck is None:
            # Unless sharded, only rank 0 writes, and the ranks have compared their copies above.
            held = [each.hold() for each in state.copies] if self.is_sharded else []
            background.begin(save, plans, prepared.late, held)

    def _end_now(self, handle: SaveHandle, outcome: Outcome) -> None:
        """Settle a save that all ranks have waited for; an error that the disk did not cause ends the run."""
        self._save_s = time.perf_counter() - self._begin_s
        if outcome.error is not None and outcome.error.code != "PL508":
            outcome.error.on_every_rank = True
            raise outcome.error
        self._settle(handle, outcome)

    def _receive(self, timeout_s: float | None) -> Outcome | None:
        """Return the outcome of the save under way or the last one, as this rank knows it."""
        if self._is_writing and self._outcome is None:
            assert self._joint is not None
            self._outcome = self._joint.wait(timeout_s, self._is_asked_to_stop)
            if self._outcome is not None:
                self._save_s = self._joint.seconds
                if self._joint.stuck_error is not None:
                    self._stuck = self._joint
        return self._outcome

    def _settle(self, handle: SaveHandle, outcome: Outcome) -> None:
        """Note what became of a save, the same on every rank; raise after too many failures in a row."""
        handle.outcome = outcome
        if handle is self._pending:
            self._pending, self._outcome, self._is_writing = None, None, False
        error = outcome.error
        if error is None:
            self._num_failed, self._last_error = 0, ""
            handle.on_commit(handle.step)
            return
        error.on_every_rank = True
        # One disk that stands still fails many saves, and counts once.
        self._num_failed += error.saw != self._last_error
        self._last_error = error.saw
        if error.code in _FATAL:
            raise error
        if self._num_failed >= self._max_failed:
            raise _too_many_error(error, self._num_failed)
        self._tell(handle, error, self._num_failed)

    def _tell_why_not(self, reason: str) -> None:
        if self._world.is_main and not self._has_told_why_not:
            self._has_told_why_not = True
            log.warning(
                "Saves are made while training waits, because %s. [PL546]",
                reason,
            )

    def _tell(self, handle: SaveHandle, error: PacelineError, num_failed: int) -> None:
        if self._world.is_main and not handle.is_told:
            handle.is_told = True
            if error.code in _FATAL:
                log.warning("%s The next save ends the run. [%s]", error.saw, error.code)
                return
            log.warning(
                "%s Training continues, and the next save tries again. Failed saves in a row: %d; "
                "checkpoint.max_failed = %d ends the run. [%s]",
                error.saw,
                num_failed,
                self._max_failed,
                error.code,
            )

    def _add_stall(self, begin_s: float) -> None:
        self._stall_s = (self._stall_s or 0.0) + time.perf_counter() - begin_s


def refuse_saving(*, in_step: bool, went_apart: bool) -> None:
    """Raise if there is no state of a run to save.

    Args:
        in_step: whether a step runs; PL545.
        went_apart: whether steps ran without communication; PL433.
    """
    if in_step:
        raise PacelineError(
            "PL545",
            saw="save() inside of a step.",
            rule="A checkpoint holds the state between two steps; inside of one, it would mix two of them.",
            fix="Call trainer.save() after trainer.step(...) has returned.",
        )
    if went_apart:
        raise PacelineError(
            "PL433",
            saw="save() after steps without communication.",
            rule="The weights of the ranks differ, so there is no state of the run to save.",
            fix="Use one trainer to measure and another to train.",
        )


def _closed_error(handle: SaveHandle) -> PacelineError:
    return PacelineError(
        "PL548",
        saw=f"The trainer was closed before the save of step {handle.step} ended, and {handle.path} is not "
        "there yet.",
        rule="At its end a trainer waits for its own share, and only rank 0 knows the outcome.",
        fix="Call wait() on the handle before the trainer is closed, or save(wait=True).",
    )


def _too_many_error(error: PacelineError, num_failed: int) -> PacelineError:
    if num_failed == 1:
        return error
    return PacelineError(
        "PL508",
        saw=f"{error.saw} It was failed save number {num_failed} in a row (checkpoint.max_failed).",
        rule=error.rule,
        fix=error.fix,
        on_every_rank=True,
    )
