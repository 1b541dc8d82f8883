"""Keeps the newest states of a run in memory, from which a restarted run goes on.

Each rank copies its share as an asynchronous save does, into one of two slots in turn, and its memory keeper
(`checkpoint/memory/keeper.py`) checks and holds it. On several nodes, the keeper also sends a copy to one on
another node (`checkpoint/memory/sending.py`).

A slot is overwritten only when all ranks have copied the state in the other one. The call is collective, and
each rank enters it once its copy is complete, on both nodes. If some rank's share was not kept, the next
state takes the same slots. So one whole state is held at any moment, wherever ranks are killed, and on
several nodes also if any one node is lost.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.memory.free_memory import read_free_memory
from paceline.checkpoint.memory.held_states import HeldShare
from paceline.checkpoint.memory.keeper import KeeperProcess
from paceline.checkpoint.memory.sending import (
    SECRET_LENGTH,
    CopyTarget,
    choose_partners,
    choose_refuges,
)
from paceline.checkpoint.same_copies import Digests
from paceline.checkpoint.tensors import FilePlan
from paceline.checkpoint.writing.state_copy import CopyMemory, CopyThread, StateCopy, lay_out, measure
from paceline.errors import PacelineError
from paceline.train.state.disks import find_domain
from paceline.train.state.memory_interval import MemoryInterval
from paceline.train.state.node_address import find_own_address
from paceline.train.state.transfer import gather
from paceline.train.state.write import RunState, agree, caught, prepare_share
from paceline.units import format_bytes
from paceline.world import World

log = logging.getLogger(__name__)

_NUM_SLOTS = 2
# Shares that the keeper may still have to check while the next one is copied, if it need not send them.
_MAX_BEHIND = 1
# The reasons why states cannot be kept, the same on all ranks.
IMPOSSIBLE = ("PL561", "PL562")


@dataclass(frozen=True)
class _MemoryEntry:
    """A rank's message in the collective of a save into memory.

    Attributes:
        error: its error in preparing the save.
        digest: of the inputs of the plan.
        token: for the name of this state; rank 0's counts.
        identity: for the manifest; rank 0's counts.
        node: number of its node.
        domain: what fails together with its node.
        keeper: its keeper, to receive copies; `None` on one node.
        has_failed: whether its share of the state before is not kept, or the copy of it.
        wanted_bytes: of memory that it has not reserved yet.
        sent_bytes: of memory that its partner has not reserved yet for its copies.
        free_bytes: that its node has.
        costs: of states in memory so far, see `MemoryInterval`.
    """

    error: PacelineError | None
    digest: str
    token: str
    identity: dict[str, Any]
    node: int
    domain: str
    keeper: CopyTarget | None
    has_failed: bool
    wanted_bytes: int
    sent_bytes: int
    free_bytes: int
    costs: tuple[float, float] | None


class MemorySaves:
    """This rank's slots of memory and its keeper.

    Args:
        world: the ranks.

    Attributes:
        interval: between states, if it follows from their cost.
        outlives: whether the last state is held for the next start, although no error ends this one.
    """

    def __init__(self, world: World) -> None:
        self.interval = MemoryInterval()
        self._world = world
        self._slots: list[CopyMemory] = []
        self._keeper: KeeperProcess | None = None
        self._thread: CopyThread | None = None
        self._address: CopyTarget | None = None
        self._last_slot = _NUM_SLOTS - 1
        self._num_behind = 0
        self._has_failed = False
        self._copied_bytes = 0
        self.outlives = False
        self._state_copy: StateCopy | None = None

    def save(
        self,
        folder: Path,
        step: int,
        state: RunState,
        identity: dict[str, Any],
        rows: dict[str, tuple[int, str]],
        max_memory: float = 1.0,
        leaving: Collection[int] = (),
    ) -> None:
        """Copy this rank's share into memory while training goes on; collective.

        Args:
            folder: of the run.
            step: optimizer steps taken.
            state: this rank's part.
            identity: for the manifest.
            rows: of rank 0, rows of metrics that not all disks have.
            max_memory: share of a node's free memory that states may take.
            leaving: numbers of nodes that leave after this state; only their ranks send copies.

        Raises:
            PacelineError: PL561 where memory cannot be kept, PL562 if there is too little; PL507 and PL525 as
                for a checkpoint. No memory is held after it.
        """
        try:
            self._save(folder, step, state, identity, rows, max_memory, leaving)
        except PacelineError:
            self.close()
            raise

    def _save(
        self,
        folder: Path,
        step: int,
        state: RunState,
        identity: dict[str, Any],
        rows: dict[str, tuple[int, str]],
        max_memory: float,
        leaving: Collection[int],
    ) -> None:
        world = self._world
        plans: list[FilePlan] = []
        late: frozenset[int] = frozenset()
        digest, content, wanted, num_bytes = "", "", 0, 0
        with caught() as raised:
            self._finish()
            share, digest = prepare_share(world.rank, state)
            plans, late, content = share.list_files(), share.late, share.content
            if self._keeper is None:
                self._start(folder)
            num_bytes = measure(plans)
            wanted = sum(num_bytes for slot in self._slots if slot.num_bytes < num_bytes)
        sent = _NUM_SLOTS * num_bytes if num_bytes > self._copied_bytes and self._address else 0
        if world.node_rank in leaving:
            sent = num_bytes  # the node that gets it may not have held copies of this rank before
        own = _MemoryEntry(
            error=raised.error,
            digest=digest,
            token=secrets.token_hex(4),
            identity=identity,
            node=world.node_rank,
            domain=find_domain(socket.gethostname(), os.environ),
            keeper=self._address,
            has_failed=self._has_failed,
            wanted_bytes=wanted,
            sent_bytes=sent,
            free_bytes=read_free_memory(),
            costs=self.interval.read_costs(),
        )
        entries = gather(world, own)
        agree([(entry.error, entry.digest) for entry in entries])
        nodes = [entry.node for entry in entries]
        partners = (
            choose_refuges(nodes, leaving)
            if leaving
            else choose_partners(nodes, [entry.domain for entry in entries])
        )
        _check_free(entries, partners, max_memory)
        with caught() as raised:
            self._reserve(plans)
        if any(entry.wanted_bytes for entry in entries):  # some rank has reserved memory, which may fail
            agree([(error, "") for error in gather(world, raised.error)])
        self._copied_bytes = max(num_bytes, self._copied_bytes)
        if not any(entry.has_failed for entry in entries):
            self._last_slot = (self._last_slot + 1) % _NUM_SLOTS
        partner = partners[world.rank]
        held = HeldShare(
            step,
            entries[0].token,
            world.rank,
            world.world_size,
            content,
            entries[0].identity,
            lay_out(plans),
            [],
            rows,
        )
        self._copy(held, plans, late, state, None if partner is None else entries[partner].keeper)
        self.interval.begin(step, [entry.costs for entry in entries])
        if self._world.is_main and (text := self.interval.describe_change()):
            log.info(text)

    def hold(self, timeout_s: float) -> str:
        """Wait until the last state is held, here and on the other node; its keepers outlive these ranks.

        Collective.

        Args:
            timeout_s: longest wait.

        Returns:
            Why the state is not held, the same on all ranks, or "".
        """
        if self._state_copy is not None:
            self._state_copy.join()
            self._state_copy = None
        self._receive(self._num_behind, timeout_s)
        problem = "its copy took too long" if self._num_behind else ""
        problem = "its share was not copied" if self._has_failed else problem
        problems = gather(self._world, problem)
        found = next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each), "")
        self.outlives = not found
        return found

    @property
    def is_copying(self) -> bool:
        """Whether a copy may be under way."""
        return self._state_copy is not None

    def before_write(self) -> None:
        """Wait until weights, optimizer state and buffers may be written to."""
        if self._state_copy is not None:
            self._state_copy.wait()

    def end_step(self) -> None:
        """Note that a step has ended, for the cost of states."""
        if self._state_copy is not None and self._state_copy.join(0.0):
            self._state_copy = None
        if self._state_copy is None:
            self._receive(self._num_behind, 0.0)
        self.interval.end_step(is_busy=self._state_copy is not None or self._num_behind > 0)

    def close(self) -> None:
        """End the keeper and free its memory; after an error or `hold`, it serves the next start."""
        if self._state_copy is not None:
            self._state_copy.join()
            self._state_copy = None
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self._keeper is not None:
            if self._world.has_failed or self.outlives:
                self._keeper.leave_behind()
            else:
                self._keeper.close()
            self._keeper = None
        for slot in self._slots:
            slot.close()
        self._slots, self._last_slot, self._num_behind = [], _NUM_SLOTS - 1, 0
        self._address, self._has_failed, self._copied_bytes = None, False, 0
        self.outlives = False
        self.interval = MemoryInterval()

    def _start(self, folder: Path) -> None:
        reason = find_obstacle()
        if reason:
            raise _impossible_error(reason)
        try:
            self._slots = self._slots or [CopyMemory() for _ in range(_NUM_SLOTS)]
            self._thread = self._thread or CopyThread()
            fds = [slot.fd for slot in self._slots]
            self._keeper = KeeperProcess(fds, os.getppid(), str(folder.absolute()))
            if self._world.num_nodes > 1:
                address, secret = find_own_address(os.environ), secrets.token_hex(SECRET_LENGTH // 2)
                port = self._keeper.listen(address, secret)
                self._address = CopyTarget(socket.gethostname(), address, port, secret)
        except (OSError, EOFError) as error:
            raise _impossible_error(str(error)) from error

    def _finish(self) -> None:
        """Wait for the copy before, and until the keeper has held it, here and on the other node."""
        if self._state_copy is not None:
            self._state_copy.join()
            self._state_copy = None
        if self._keeper is None:
            return
        # Without copies to send, the keeper checks what it has although this rank may end meanwhile.
        self._receive(self._num_behind - (0 if self._address else _MAX_BEHIND), None)
        self._receive(self._num_behind, 0.0)

    def _receive(self, count: int, timeout_s: float | None) -> None:
        """Take up to so many answers of the keeper."""
        try:
            while count > 0 and self._keeper is not None:
                problem = self._keeper.read_kept(timeout_s)
                if problem is None:
                    return
                self._num_behind -= 1
                count -= 1
                if problem:
                    self._has_failed = True
                    log.warning(
                        "A state of rank %d in memory was not copied to another node: %s. If this node is "
                        "lost, the run goes on from an older state. The next state tries again. [PL564]",
                        self._world.rank,
                        problem,
                    )
        except EOFError:
            assert self._keeper is not None
            log.warning(
                "The memory keeper of rank %d has ended; the next state starts another one.", self._world.rank
            )
            self._keeper.close()
            self._keeper, self._address, self._num_behind, self._has_failed = None, None, 0, True

    def _reserve(self, plans: list[FilePlan]) -> None:
        try:
            for slot in self._slots:
                slot.reserve(measure(plans), self._world.device)
        except OSError as error:
            raise _impossible_error(f"{measure(plans):,} bytes of memory: {error.strerror}") from error

    def _copy(
        self,
        share: HeldShare,
        plans: list[FilePlan],
        late: frozenset[int],
        state: RunState,
        target: CopyTarget | None,
    ) -> None:
        keeper, thread, slot = self._keeper, self._thread, self._last_slot
        assert keeper is not None
        assert thread is not None
        self._num_behind += 1
        self._has_failed = False
        keeper.drop(slot)

        def end(error: PacelineError | None, digests: list[Digests]) -> None:
            if error is not None:
                self._num_behind -= 1
                self._has_failed = True
                log.warning("%s [%s]", error.saw, error.code)
                return
            keeper.keep(slot, share.dump() | {"digests": digests}, target)

        held = [each.hold() for each in state.copies]
        self._state_copy = StateCopy(thread, self._slots[slot], plans, late, held, self._world.device, end)


def _check_free(
    entries: Sequence[_MemoryEntry], partners: Sequence[int | None], max_memory: float = 1.0
) -> None:
    """Raise PL562 if a node has less memory than its ranks and the copies of others take.

    Args:
        entries: by rank.
        partners: by rank the one that gets its copies.
        max_memory: share of the free memory that may be taken.
    """
    wanted: dict[int, int] = {}
    for entry, partner in zip(entries, partners, strict=True):
        wanted[entry.node] = wanted.get(entry.node, 0) + entry.wanted_bytes
        if partner is not None:
            node = entries[partner].node
            wanted[node] = wanted.get(node, 0) + entry.sent_bytes
    for node, num_bytes in sorted(wanted.items()):
        of_node = [rank for rank, entry in enumerate(entries) if entry.node == node]
        free = max(entries[rank].free_bytes for rank in of_node)
        if num_bytes > int(free * max_memory):
            keeper = entries[of_node[0]].keeper
            raise _short_error(num_bytes, free, max_memory, "" if keeper is None else keeper.host)


def find_obstacle() -> str:
    """Return why no memory can be kept for the next start, or ""."""
    if not _has_proc():
        return "this system has no /proc, which a new start needs to find the memory"
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "no launcher started these ranks, so nothing would start them again"
    return ""


def may_restart(environ: Mapping[str, str]) -> bool:
    """Return whether the launcher that started this rank may start it again, by the agent's environment."""
    number = environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    return "TORCHELASTIC_RUN_ID" in environ and number.isdigit() and int(number) > 0


def _has_proc() -> bool:
    return os.path.isdir("/proc/self/fd")


def _impossible_error(reason: str) -> PacelineError:
    return PacelineError(
        "PL561",
        saw=f"States cannot be kept in memory: {reason}.",
        rule="A process beside each rank holds the newest states of a run, until the launcher starts the "
        "ranks of that node again.",
        fix="Set checkpoint.memory_every = 0 and checkpoint.asynchronous = true, and save to the disk more "
        "often. Or start the run with paceline run, paceline train --nnodes or torchrun.",
    )


def _short_error(wanted: int, free: int, max_memory: float, host: str) -> PacelineError:
    limit = "" if max_memory == 1 else f", of which they may take {max_memory:.0%}"
    missing = wanted - int(free * max_memory)
    where = f" on {host}" if host else ""
    copies = " Copies of the states of another node are held too." if host else ""
    found = PacelineError(
        "PL562",
        saw=f"Keeping states in memory takes {format_bytes(wanted)}{where}, and {format_bytes(free)} are "
        f"free{limit}: {format_bytes(missing)} are missing.",
        rule=f"Two states are held in turn, because the older one must stay until the newer one is "
        f"complete.{copies}",
        fix="Set checkpoint.memory_every = 0, or use nodes with more memory.",
    )
    found.on_every_rank = True
    return found
