"""Keeps the newest states of a run in memory, from which a restarted run goes on.

Each rank copies its share as an asynchronous save does, into one of two slots in turn, and its memory keeper
(`checkpoint/memory_keeper.py`) checks and holds it. A slot is written over only when all ranks have copied
the state in the other one: the call is collective, and each rank comes to it with its copy complete. So one
whole state is held at any moment, wherever ranks are killed.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.held_states import HeldShare
from paceline.checkpoint.memory_keeper import KeeperProcess
from paceline.checkpoint.same_copies import Digests
from paceline.checkpoint.state_copy import CopyMemory, StateCopy, lay_out, measure
from paceline.checkpoint.tensors import FilePlan
from paceline.errors import PacelineError
from paceline.train.state.transfer import gather
from paceline.train.state.write import RunState, agree, caught, prepare_share
from paceline.units import format_bytes
from paceline.world import World

log = logging.getLogger(__name__)

_NUM_SLOTS = 2
# Shares that the keeper may still have to check while the next one is copied.
_MAX_BEHIND = 1


@dataclass(frozen=True)
class _MemoryEntry:
    """A rank's message in the collective of a save into memory.

    Attributes:
        error: its error in preparing the save.
        digest: of the inputs of the plan.
        token: for the name of this state; rank 0's counts.
        identity: for the manifest; rank 0's counts.
        wanted_bytes: of memory that it has not reserved yet.
        free_bytes: that its node has.
    """

    error: PacelineError | None
    digest: str
    token: str
    identity: dict[str, Any]
    wanted_bytes: int
    free_bytes: int


class MemorySaves:
    """This rank's slots of memory and its keeper.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._slots: list[CopyMemory] = []
        self._keeper: KeeperProcess | None = None
        self._turn = 0
        self._num_behind = 0
        self._state_copy: StateCopy | None = None

    def save(self, folder: Path, step: int, state: RunState, identity: dict[str, Any]) -> None:
        """Copy this rank's share into memory while training goes on; collective.

        Args:
            folder: of the run.
            step: optimizer steps taken.
            state: this rank's part.
            identity: for the manifest.

        Raises:
            PacelineError: PL561 where memory cannot be kept, PL562 if there is too little; PL507 and PL525 as
                for a checkpoint.
        """
        plans: list[FilePlan] = []
        late: frozenset[int] = frozenset()
        digest, content, wanted = "", "", 0
        with caught() as raised:
            self._finish()
            share, digest = prepare_share(self._world, state)
            plans, late, content = share.list_files(), share.late, share.content
            if self._keeper is None:
                self._start(folder)
            num_bytes = measure(plans)
            wanted = sum(num_bytes for slot in self._slots if slot.num_bytes < num_bytes)
        free = _free_memory() if wanted else 0
        entries = gather(
            self._world, _MemoryEntry(raised.error, digest, secrets.token_hex(4), identity, wanted, free)
        )
        agree([(entry.error, entry.digest) for entry in entries])
        total, available = sum(entry.wanted_bytes for entry in entries), max(e.free_bytes for e in entries)
        if total > available:
            raise _short_error(total, available)
        with caught() as raised:
            self._reserve(plans)
        if total:  # some rank has reserved memory, which may fail
            agree([(error, "") for error in gather(self._world, raised.error)])
        self._copy(step, plans, late, content, state, entries[0])

    def before_write(self) -> None:
        """Wait until weights, optimizer state and buffers may be written to."""
        if self._state_copy is not None:
            self._state_copy.wait()

    def close(self) -> None:
        """Let the keeper go, and the memory with it."""
        if self._state_copy is not None:
            self._state_copy.join()
            self._state_copy = None
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        for slot in self._slots:
            slot.close()
        self._slots, self._turn, self._num_behind = [], 0, 0

    def _start(self, folder: Path) -> None:
        reason = _why_not(self._world)
        if reason:
            raise _impossible_error(reason)
        try:
            self._slots = self._slots or [CopyMemory() for _ in range(_NUM_SLOTS)]
            fds = [slot.fd for slot in self._slots]
            self._keeper = KeeperProcess(fds, os.getppid(), str(folder.absolute()))
        except OSError as error:
            raise _impossible_error(str(error)) from error

    def _finish(self) -> None:
        """Wait for the copy before, and until the keeper has at most one share left to check."""
        if self._state_copy is not None:
            self._state_copy.join()
            self._state_copy = None
        if self._keeper is None:
            return
        try:
            while self._num_behind and self._keeper.read_kept(
                None if self._num_behind > _MAX_BEHIND else 0.0
            ):
                self._num_behind -= 1
        except EOFError:
            log.warning(
                "The memory keeper of rank %d has ended; the next state starts another one.", self._world.rank
            )
            self._keeper.close()
            self._keeper, self._num_behind = None, 0

    def _reserve(self, plans: list[FilePlan]) -> None:
        try:
            for slot in self._slots:
                slot.reserve(measure(plans), self._world.device)
        except OSError as error:
            raise _impossible_error(f"{measure(plans):,} bytes of memory: {error.strerror}") from error

    def _copy(
        self,
        step: int,
        plans: list[FilePlan],
        late: frozenset[int],
        content: str,
        state: RunState,
        agreed: _MemoryEntry,
    ) -> None:
        keeper, slot = self._keeper, self._turn
        assert keeper is not None
        world = self._world
        self._turn = (slot + 1) % _NUM_SLOTS
        self._num_behind += 1
        keeper.drop(slot)

        def end(error: PacelineError | None, digests: list[Digests]) -> None:
            if error is not None:
                self._num_behind -= 1
                log.warning("%s [%s]", error.saw, error.code)
                return
            share = HeldShare(
                step,
                agreed.token,
                world.rank,
                world.world_size,
                content,
                agreed.identity,
                lay_out(plans),
                digests,
            )
            keeper.keep(slot, share.dump())

        held = [each.hold() for each in state.copies]
        self._state_copy = StateCopy(self._slots[slot], plans, late, held, world.device, end)


def _why_not(world: World) -> str:
    """Return why no memory can be kept for a restart, or ""."""
    if world.local_world_size < world.world_size:
        return "the run has several nodes, and a state in memory stays on its node"
    if not _has_proc():
        return "this system has no /proc, by which a new start finds the memory"
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "no launcher started these ranks, so nothing starts them again"
    return ""


def _has_proc() -> bool:
    return os.path.isdir("/proc/self/fd")


def _free_memory() -> int:
    """Return the bytes of memory that this node has free, by the kernel and by the limit of the container."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        free = 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 1 << 62
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, max(0, int(limit) - used)) if limit.isdigit() else free


def _impossible_error(reason: str) -> PacelineError:
    return PacelineError(
        "PL561",
        saw=f"States cannot be kept in memory: {reason}.",
        rule="A process beside each rank holds the newest states of a run, until the launcher starts the "
        "ranks of that node again.",
        fix="Set checkpoint.memory_every = 0 and checkpoint.asynchronous = true, and save to the disk more "
        "often. For one node, start the run with paceline run, paceline train --nproc or torchrun.",
    )


def _short_error(wanted: int, free: int) -> PacelineError:
    found = PacelineError(
        "PL562",
        saw=f"Keeping states in memory takes {format_bytes(wanted)}, and {format_bytes(free)} are free: "
        f"{format_bytes(wanted - free)} are missing.",
        rule="Two states are held in turn, because the older one must stay until the newer one is complete.",
        fix="Set checkpoint.memory_every = 0, or use a node with more memory.",
    )
    found.on_every_rank = True
    return found
