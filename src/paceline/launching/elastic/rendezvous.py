"""The rendezvous of a job's launchers: torch's, with three fixes.

- A single node has no other to meet: no protocol with its random delay, and no name of this machine that has
  to resolve.
- torch decides by this machine's name whether a launcher hosts the c10d store, which fails where that name
  does not resolve. Here addresses decide. Of several launchers on the host, the first to take the port hosts
  the store and the others connect to it.
- torch compares the time of another node's heartbeat with this node's clock. Where clocks differ by more than
  15 s, a node removes a live one and trains alone (`dynamic_rendezvous.py`, `_sanitize`). Here a node is lost
  when its heartbeat has not changed for that long by this node's own monotonic clock.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from paceline.launching.elastic.network import is_own_host
from paceline.torch_seams.elastic import use_own_clock

ONE_NODE = "one-node"
_LOOPBACK = "127.0.0.1"
_C10D_PORT, _STATIC_PORT = 29400, 29500  # torch's defaults


def build_rendezvous(config: LaunchConfig) -> tuple[RendezvousHandler, tuple[str | None, int | None]]:
    """Build the handler for a launch, and return the ranks' master address and port if the user set them."""
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
    use_own_clock(handler)
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
