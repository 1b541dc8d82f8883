"""How the launchers of a job's nodes meet: torch's rendezvous, with three repairs.

- A single node needs nobody to meet: no protocol with its random delay, and no name of this machine that has
  to resolve.
- torch decides by this machine's name whether a launcher hosts the c10d store, which fails where that name
  does not resolve. Here addresses decide. Of several launchers on the host, the first to take the port hosts
  the store and the others connect to it.
- torch compares the time of another node's heartbeat with this node's clock. Where clocks differ by more than
  15 s, a node removes a live one and trains alone (`dynamic_rendezvous.py`, `_sanitize`). Here a node is lost
  when its heartbeat has not changed for that long by this node's own monotonic clock.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _BackendRendezvousStateHolder,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from paceline.launching.elastic.network import is_own_host

ONE_NODE = "one-node"
_LOOPBACK = "127.0.0.1"
_C10D_PORT, _STATIC_PORT = 29400, 29500  # torch's defaults


def build_rendezvous(config: LaunchConfig) -> tuple[RendezvousHandler, tuple[str | None, int | None]]:
    """Build the handler for a launch, and the ranks' master address and port where the user gave them."""
    if config.rdzv_backend == ONE_NODE:
        return _OneNode(config.run_id), (None, None)
    if config.rdzv_backend == "c10d":
        return _build_c10d(config), (None, None)
    master: tuple[str | None, int | None] = (None, None)
    if config.rdzv_backend == "static":
        master = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=_STATIC_PORT)
    return registry.get_rendezvous_handler(_read_parameters(config)), master


def _read_parameters(config: LaunchConfig, **more: Any) -> RendezvousParameters:
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **{**config.rdzv_configs, **more},
    )


def _build_c10d(config: LaunchConfig) -> RendezvousHandler:
    handler = _connect_c10d(config)
    if isinstance(handler, DynamicRendezvousHandler):
        theirs: Any = handler._state_holder
        executor: Any = handler._op_executor
        handler._state_holder = executor._state_holder = _OwnClockState(theirs._backend, theirs._settings)
    return handler


def _connect_c10d(config: LaunchConfig) -> RendezvousHandler:
    if "is_host" in config.rdzv_configs or config.rdzv_configs.get("store_type", "tcp") != "tcp":
        return registry.get_rendezvous_handler(_read_parameters(config))
    host, _ = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=_C10D_PORT)
    if is_own_host(host):
        try:
            return registry.get_rendezvous_handler(_read_parameters(config, is_host=True))
        except RendezvousConnectionError:
            pass  # the port is taken, as a rule by another launcher of this job
    return registry.get_rendezvous_handler(_read_parameters(config, is_host=False))


class _OwnClockState(_BackendRendezvousStateHolder):
    """The rendezvous' state, whose times of other nodes are translated to this node's clock.

    A heartbeat counts from when this node first saw it, and the last call from when this node first saw that
    enough nodes have met.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seen: dict[Any, tuple[datetime, float]] = {}
        self._last_call: tuple[int, float] | None = None

    def _sanitize(self) -> None:
        state = self._state
        now, now_s = datetime.now(UTC), time.monotonic()
        told = dict(state.last_heartbeats)
        self._seen = {
            node: self._seen[node] if self._seen.get(node, (None, 0.0))[0] == beat else (beat, now_s)
            for node, beat in told.items()
        }
        state.last_heartbeats = {
            node: now - timedelta(seconds=now_s - seen_s) for node, (_, seen_s) in self._seen.items()
        }
        super()._sanitize()
        # This node's own is compared with its own clock, and the others' go back as they were told.
        state.last_heartbeats = {node: told[node] for node in state.last_heartbeats}
        if state.deadline is None:
            self._last_call = None
            return
        if self._last_call is None or self._last_call[0] != state.round:
            self._last_call = state.round, now_s
        left = self._settings.timeout.last_call - timedelta(seconds=now_s - self._last_call[1])
        state.deadline = now + left


class _OneNode(RendezvousHandler):
    """The rendezvous of a job on one node: each round has a store of its own, at the loopback address."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "one-node"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
        where = RendezvousStoreInfo(_LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("torchelastic", self._store), 0, 1, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
