"""The rendezvous of a job's launchers: replaces or corrects torch's in three respects.

- A single node meets no others, so it skips the protocol (`one_node.py`).
- torch keeps the state of `c10d` in a store on one node; if that node is lost, so is the job. An etcd or a
  common folder holds it outside of the nodes (`members.py`). A launcher recognises its own endpoint by
  address, not by host name as in torch, because the name may not resolve.
- torch compares the timestamp of another node's heartbeat with this node's clock. If clocks differ by more
  than 15 s, a node removes a live one and trains alone (`dynamic_rendezvous.py`, `_sanitize`). Here a node
  counts as lost when its beat has not changed for some time by this node's own monotonic clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from paceline.errors import PacelineError
from paceline.launching.elastic.members import StoreRendezvous, build_node
from paceline.launching.elastic.network import is_own_host
from paceline.launching.elastic.one_node import OneNode
from paceline.launching.elastic.tcp_record import TcpRecord
from paceline.launching.members.endpoints import STORES, read_endpoint
from paceline.launching.members.open_store import open_store
from paceline.launching.members.record import Terms
from paceline.launching.members.shared_folder import SharedFolder
from paceline.launching.members.store import Store
from paceline.launching.members.waits import Waits

log = logging.getLogger(__name__)

ONE_NODE = "one-node"
_WITHOUT_EFFECT = {"read_timeout", "close_timeout", "heartbeat_timeout"}
_STATIC_PORT = 29500  # torch's default


@dataclass(frozen=True)
class Meeting:
    """The settings of a job's rendezvous that torchrun's flags do not have.

    Attributes:
        code: identifies what the ranks run (`code.py`).
        folder: identifies the script's working folder (`code.py`).
    """

    waits: Waits = field(default_factory=Waits)
    code: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""


def build_rendezvous(
    config: LaunchConfig,
    meeting: Meeting,
    *,
    on_loss: Callable[[], None] = lambda: None,
    hold: Callable[[float], None] = lambda until_s: None,
    is_asked: Callable[[], bool] = lambda: False,
) -> tuple[RendezvousHandler, tuple[str | None, int | None]]:
    """Build the handler for a launch, and return the ranks' master address and port if the user set them.

    Args:
        config: settings of the launch.
        meeting: settings of the rendezvous, for `c10d`, `etcd` and `folder`.
        on_loss: called as soon as another node is lost.
        hold: lets this node's ranks run until some time.
        is_asked: whether this launcher was asked to stop.
    """
    master: tuple[str | None, int | None] = (None, None)
    if config.rdzv_backend == ONE_NODE:
        return OneNode(config.run_id), master
    if config.rdzv_backend in ("c10d", *STORES):
        for key in _WITHOUT_EFFECT & config.rdzv_configs.keys():
            log.warning(
                "--rdzv-conf %s has no effect: the waits follow from --detect-s and --join-timeout", key
            )
        nodes = config.min_nodes, config.max_nodes
        handler = StoreRendezvous(
            config.run_id,
            _open_store(config),
            Terms(*nodes, dict(meeting.code)),
            meeting.waits,
            build_node(config.local_addr or "localhost", config.nproc_per_node, config.role, meeting.folder),
            is_elastic=nodes[0] < nodes[1] or config.max_restarts > 0,
            on_loss=on_loss,
            hold=hold,
            is_asked=is_asked,
        )
        return handler, master
    if config.rdzv_backend == "static":
        master = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=_STATIC_PORT)
    if config.rdzv_backend == "etcd-v2":
        raise PacelineError(
            "PL344",
            saw="--rdzv-backend etcd-v2.",
            rule="torch's own backend for etcd needs etcd's interface v2, which is off since etcd 3.4.",
            fix="Use --rdzv-backend etcd, which needs no library and uses the interface v3.",
        )
    return registry.get_rendezvous_handler(_read_parameters(config)), master


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


def _open_store(config: LaunchConfig) -> Store:
    """Open the job's store; with `c10d`, serve it on the node of the endpoint."""
    if config.rdzv_backend in STORES:
        return open_store(config.rdzv_backend, config.rdzv_endpoint, config.run_id)
    if config.rdzv_configs.get("store_type", "tcp") == "file":
        return SharedFolder(Path(config.rdzv_endpoint), config.run_id)
    place = read_endpoint(config.rdzv_endpoint)
    is_host = _read_parameters(config).get_as_bool("is_host")
    is_own = _is_own(place[0]) if is_host is None else is_host
    store = TcpRecord(place, config.run_id, config.local_addr or "localhost" if is_own else None)
    if store.is_host and (config.min_nodes < config.max_nodes or config.max_restarts > 0):
        log.info(
            "this node holds the store of the job, which ends with this node; with --rdzv-backend etcd or "
            "folder, the job survives the loss of any node"
        )
    return store


def _is_own(host: str) -> bool:
    """Return whether a host is this machine; False for a name that no longer resolves."""
    try:
        return is_own_host(host)
    except PacelineError:
        return False
