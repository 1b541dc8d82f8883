"""The rendezvous of a job's launchers: replaces or corrects torch's in three respects.

- A single node meets no others, so it skips the protocol, its random delay, and the lookup of its own host
  name.
- torch keeps the state of `c10d` in a store on one node; if that node is lost, so is the job. Here the
  launchers agree among themselves (`members.py`). A launcher recognises its own endpoint by address, not by
  host name as in torch, because the name may not resolve.
- torch compares the timestamp of another node's heartbeat with this node's clock. If clocks differ by more
  than 15 s, a node removes a live one and trains alone (`dynamic_rendezvous.py`, `_sanitize`). Here a node
  counts as lost when its heartbeat has not changed for that long by this node's own monotonic clock.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from paceline.errors import PacelineError
from paceline.launching.elastic.members import MembersRendezvous, find_free_port, shares_store
from paceline.launching.elastic.network import WITNESSES, is_own_host
from paceline.launching.members.endpoints import read_endpoints
from paceline.launching.members.open_witness import name_witness, open_witness
from paceline.launching.members.records import Terms
from paceline.launching.members.witness import Witness
from paceline.launching.members.world import Waits
from paceline.torch_seams.elastic import use_own_clock

log = logging.getLogger(__name__)

ONE_NODE = "one-node"
_LOOPBACK = "127.0.0.1"
_WITHOUT_EFFECT = {"read_timeout", "close_timeout", "heartbeat_timeout"}
_STATIC_PORT = 29500  # torch's default


@dataclass(frozen=True)
class Meeting:
    """The settings of a job's rendezvous that torchrun's flags do not have.

    Attributes:
        waits: all waits.
        witness: `--witness`, for `c10d`.
        code: identifies what the ranks run (`code.py`).
        folder: identifies the script's working folder (`code.py`).
    """

    waits: Waits = field(default_factory=Waits)
    witness: str | None = None
    code: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""


def build_rendezvous(
    config: LaunchConfig,
    meeting: Meeting,
    *,
    on_loss: Callable[[], None] = lambda: None,
    is_asked: Callable[[], bool] = lambda: False,
) -> tuple[RendezvousHandler, tuple[str | None, int | None]]:
    """Build the handler for a launch, and return the ranks' master address and port if the user set them.

    Args:
        config: settings of the launch.
        meeting: settings of the rendezvous, for `c10d`, `etcd` and `folder`.
        on_loss: called as soon as another node is lost, for `c10d`.
        is_asked: whether this launcher was asked to stop.
    """
    if config.rdzv_backend == ONE_NODE:
        return _OneNode(config.run_id), (None, None)
    if config.rdzv_backend == "c10d":
        if config.rdzv_configs.get("store_type", "tcp") == "tcp":
            record = None if meeting.witness is None else open_witness(meeting.witness, config.run_id)
            return _build_members(config, meeting, on_loss, is_asked, record), (None, None)
        handler = registry.get_rendezvous_handler(_read_parameters(config))
        use_own_clock(handler)
        return handler, (None, None)
    if config.rdzv_backend in WITNESSES:
        record = open_witness(name_witness(config.rdzv_backend, config.rdzv_endpoint), config.run_id)
        return _build_members(config, meeting, on_loss, is_asked, record, finds_by_record=True), (None, None)
    master: tuple[str | None, int | None] = (None, None)
    if config.rdzv_backend == "static":
        master = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=_STATIC_PORT)
    try:
        return registry.get_rendezvous_handler(_read_parameters(config)), master
    except ImportError as error:
        raise PacelineError(
            "PL344",
            saw=f"--rdzv-backend {config.rdzv_backend}: {error}.",
            rule="torch's own backends for etcd need a client library, and etcd's interface v2, which is off "
            "since etcd 3.4.",
            fix="Use --rdzv-backend etcd, which needs no library and uses the interface v3.",
        ) from None


def read_waits(config: LaunchConfig, detect_s: float | None, join_s: float | None) -> Waits:
    """Return all waits of a launch, from the command's flags and from torchrun's `--rdzv-conf`."""
    parameters = _read_parameters(config)
    interval, attempts = (parameters.get_as_int(f"keep_alive_{n}") for n in ("interval", "max_attempt"))
    if detect_s is None and (interval is not None or attempts is not None):
        detect_s = float((interval or 5) * (attempts or 3))
    join_s = parameters.get_as_int("join_timeout") if join_s is None else join_s
    last_call_s = parameters.get_as_int("last_call_timeout")
    default = Waits()
    return Waits(
        default.detect_s if detect_s is None else detect_s,
        default.join_s if join_s is None else float(join_s),
        None if last_call_s is None else float(last_call_s),
    )


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


def _build_members(
    config: LaunchConfig,
    meeting: Meeting,
    on_loss: Callable[[], None],
    is_asked: Callable[[], bool],
    witness: Witness | None,
    *,
    finds_by_record: bool = False,
) -> MembersRendezvous:
    for key in _WITHOUT_EFFECT & config.rdzv_configs.keys():
        log.warning("--rdzv-conf %s has no effect: the waits follow from --detect-s and --join-timeout", key)
    endpoints = [] if finds_by_record else read_endpoints(config.rdzv_endpoint)
    is_host = _read_parameters(config).get_as_bool("is_host")
    if is_host is None:
        own = next((endpoint for endpoint in endpoints if _is_own(endpoint[0])), None)
    else:
        own = endpoints[0] if is_host and endpoints else None
    return MembersRendezvous(
        Terms(
            config.run_id,
            config.min_nodes,
            config.max_nodes,
            meeting.code,
            config.nproc_per_node,
            meeting.folder,
        ),
        meeting.waits,
        config.local_addr or "localhost",
        endpoints,
        own=own,
        is_elastic=config.min_nodes < config.max_nodes or config.max_restarts > 0,
        on_loss=on_loss,
        is_asked=is_asked,
        witness=witness,
    )


def _is_own(host: str) -> bool:
    """Return whether a host is this machine; False for a name that no longer resolves."""
    try:
        return is_own_host(host)
    except PacelineError:
        return False


class _OneNode(RendezvousHandler):
    """The rendezvous of a job on one node: each round has a store of its own, at the loopback address."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "one-node"

    @property
    def use_agent_store(self) -> bool:
        return shares_store()

    def next_rendezvous(self) -> RendezvousInfo:
        with socket.create_server((_LOOPBACK, 0)) as server:  # torch's own server listens on all interfaces
            port = int(server.getsockname()[1])
            self._store = TCPStore(
                _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
            )
        port = self._store.port if self.use_agent_store else find_free_port()
        where = RendezvousStoreInfo(_LOOPBACK, port)
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
