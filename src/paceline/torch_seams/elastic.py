"""Accesses private parts of torchelastic's rendezvous and agent."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from paceline.torch_seams.check import checked, set_existing

with checked("elastic"):
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        _BackendRendezvousStateHolder,
        _RendezvousExitOp,
    )

_LEAVE_S = 5.0


def forget_store(handler: RendezvousHandler) -> None:
    """Make a rendezvous open a new store for the next round.

    A dynamic rendezvous otherwise keeps its first store for all rounds (dynamic_rendezvous.py,
    next_rendezvous).
    """
    if isinstance(handler, DynamicRendezvousHandler):
        set_existing(handler, "_bootstrap_store_info", None)
        set_existing(handler, "_shared_tcp_store_server", None)


def leave_round(handler: RendezvousHandler) -> None:
    """Take this node out of a dynamic rendezvous: others wait for a node that only ends until its heartbeat
    has expired.

    Raises:
        RendezvousError: the others cannot be reached.
    """
    if isinstance(handler, DynamicRendezvousHandler):
        handler._stop_heartbeats()
        executor: Any = handler._op_executor
        executor.run(_RendezvousExitOp(), time.monotonic() + _LEAVE_S)


def use_own_clock(handler: RendezvousHandler) -> None:
    """Make a dynamic rendezvous measure the times of other nodes with this node's clock."""
    if isinstance(handler, DynamicRendezvousHandler):
        theirs: Any = handler._state_holder
        executor: Any = handler._op_executor
        state = OwnClockState(theirs._backend, theirs._settings)
        set_existing(handler, "_state_holder", state)
        set_existing(executor, "_state_holder", state)


class OwnClockState(_BackendRendezvousStateHolder):
    """The rendezvous' state, with the times of other nodes converted to this node's clock.

    A heartbeat's age counts from the time when this node first saw it. The last call counts from the time
    when this node first saw that enough nodes have met.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seen: dict[Any, tuple[datetime, float]] = {}
        self._last_call: tuple[int, float] | None = None

    def _sanitize(self) -> None:
        state = self._state
        now, now_s = datetime.now(UTC), time.monotonic()
        beats = dict(state.last_heartbeats)
        self._seen = {
            node: self._seen[node] if self._seen.get(node, (None, 0.0))[0] == beat else (beat, now_s)
            for node, beat in beats.items()
        }
        state.last_heartbeats = {
            node: now - timedelta(seconds=now_s - seen_s) for node, (_, seen_s) in self._seen.items()
        }
        super()._sanitize()
        # Only this node's comparison uses converted times; the state goes back with the times as received.
        state.last_heartbeats = {node: beats[node] for node in state.last_heartbeats}
        if state.deadline is None:
            self._last_call = None
            return
        if self._last_call is None or self._last_call[0] != state.round:
            self._last_call = state.round, now_s
        left = self._settings.timeout.last_call - timedelta(seconds=now_s - self._last_call[1])
        state.deadline = now + left


class SteppedAgent(LocalElasticAgent):
    """torchelastic's agent, with public names for the steps that a subclass extends."""

    def meet(self, group: WorkerGroup) -> None:
        """Meet the other nodes, and assign numbers to the ranks of this one."""
        super()._rendezvous(group)

    def start_ranks(self, group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks of this node, and return their ids by local rank."""
        started: dict[int, Any] = super()._start_workers(group)
        return started

    def poll_ranks(self, group: WorkerGroup) -> RunResult:
        """Return the state of this node's ranks."""
        result: RunResult = super()._monitor_workers(group)
        return result

    def restart_ranks(self, group: WorkerGroup) -> None:
        """Stop the ranks of this node, and start them for the next round."""
        super()._restart_workers(group)

    def stop_ranks(self, group: WorkerGroup) -> None:
        """Stop the ranks of this node."""
        self._stop_workers(group)

    def wait_for_others(self) -> None:
        """Wait until the ranks of the other nodes have ended too."""
        super()._exit_barrier()  # type: ignore[no-untyped-call]

    @property
    def restarts_left(self) -> int:
        """The number of restarts left."""
        return self._remaining_restarts

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.meet(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_ranks(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.poll_ranks(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.restart_ranks(worker_group)

    def _exit_barrier(self) -> None:
        self.wait_for_others()
