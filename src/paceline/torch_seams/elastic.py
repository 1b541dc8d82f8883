"""Accesses private parts of torchelastic's rendezvous and agent."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
)

from paceline.torch_seams.installed import checked, set_existing

with checked("elastic"):
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        _Action,
        _DistributedRendezvousOpExecutor,
        _RendezvousState,
        _RendezvousStateHolder,
    )

RoundState = _RendezvousState
"""The state of a rendezvous: the nodes of its round, and those that wait."""
RoundStateHolder = _RendezvousStateHolder
"""The interface through which torch reads and changes that state."""


def forget_store(handler: RendezvousHandler) -> None:
    """Make a rendezvous open a new store for the next round.

    A dynamic rendezvous otherwise keeps its first store for all rounds (dynamic_rendezvous.py,
    next_rendezvous).
    """
    if isinstance(handler, DynamicRendezvousHandler):
        set_existing(handler, "_bootstrap_store_info", None)
        set_existing(handler, "_shared_tcp_store_server", None)


def fill_store(first: tuple[str, int], nodes: Sequence[tuple[str, int]]) -> Store:
    """Return a store of this process with all that torch's agents tell each other before ranks start.

    Args:
        first: address and port of the store on node number 0.
        nodes: role and number of ranks of each node, in the order of their numbers.
    """
    store = HashStore()
    store.set("MASTER_ADDR", first[0])
    store.set("MASTER_PORT", str(first[1]))
    for number, (role, size) in enumerate(nodes):
        info = {"role": role, "rank": number, "local_world_size": size}
        parts = [nodes[:number], nodes]
        of_role = [[node for node in part if node[0] == role] for part in parts]
        ranks = [sum(size for _, size in part) for part in (*parts, *of_role)]
        store.set(f"torchelastic/role_info/{number}", json.dumps(info))
        store.set(f"torchelastic/assigned_ranks/{number}", json.dumps(ranks))
    return store


class Rounds(DynamicRendezvousHandler):
    """torch's dynamic rendezvous over a state that the caller holds, with a store for each round.

    torch beats through this state, and waits for a second between two readings. Here the caller beats, and
    decides how long to wait.

    Args:
        node: this node; nodes are numbered in their order. It has an attribute `addr`.
        join_s: longest wait for a round.
        state: reads and writes the state.
        pause: waits for a moment between two readings; may raise an error.
        may_join: whether this node may end the round that runs, to join the next one.
        open_store: returns `fill_store` of the round that was completed, and on number 0 its ranks' store.
    """

    def __init__(
        self,
        node: Any,
        run_id: str,
        nodes: tuple[int, int],
        join_s: float,
        state: RoundStateHolder,
        *,
        pause: Callable[[], None],
        may_join: Callable[[], bool],
        open_store: Callable[[], tuple[Store, TCPStore | None]],
    ) -> None:
        timeout = RendezvousTimeout(join=timedelta(seconds=join_s))
        settings = RendezvousSettings(run_id, *nodes, timeout, timedelta(days=1), 1)
        super().__init__(node, settings, "c10d", HashStore(), state)
        executor = _PatientExecutor(node, state, settings)
        executor.pause, executor.may_join = pause, may_join
        set_existing(self, "_op_executor", executor)
        self._open_store = open_store

    def next_rendezvous(self) -> RendezvousInfo:
        forget_store(self)
        return super().next_rendezvous()

    def _get_store(self) -> Store:
        found, self._server = self._open_store()
        return found

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore | None:
        return self._server


class _PatientExecutor(_DistributedRendezvousOpExecutor):
    """Torch's executor of operations, which waits between two readings as the caller does."""

    pause: Callable[[], None]
    may_join: Callable[[], bool]

    def run(self, state_handler: Callable[..., Any], deadline: float, update_deadline: Any = None) -> None:
        def handle(context: Any, until: float) -> Any:
            action = state_handler(context, until)
            while action == _Action.SYNC or (action == _Action.ADD_TO_WAIT_LIST and not self.may_join()):
                self.pause()
                self._state_holder.sync()
                self._state = context.state = self._state_holder.state
                action = state_handler(context, until)
            return action

        super().run(handle, deadline, update_deadline)


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
