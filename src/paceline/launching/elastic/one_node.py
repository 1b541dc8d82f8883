"""The rendezvous of a job on one node: it meets no others, so it skips torch's protocol and its delays."""

from __future__ import annotations

import errno
import os
import socket

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from paceline.errors import PacelineError

_LOOPBACK, _LOOPBACK_6 = "127.0.0.1", "::1"
_PATIENCE_S = 5.0


class OneNode(RendezvousHandler):
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
        with _listen() as server:  # torch's own server listens on all interfaces
            address, port = server.getsockname()[:2]
            self._store = TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
            )
        where = RendezvousStoreInfo(address, self._store.port)
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


def _listen() -> socket.socket:
    """Return a socket that listens at the loopback address, of IPv6 on a machine without another."""
    try:
        server = socket.create_server((_LOOPBACK, 0))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # gloo would use the address of the other loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        server = socket.create_server((_LOOPBACK_6, 0), family=socket.AF_INET6)
    try:
        address, port = server.getsockname()[:2]
        socket.create_connection((address, port), timeout=_PATIENCE_S).close()
    except OSError as error:
        server.close()
        raise PacelineError(
            "PL344",
            saw=f"this machine does not reach its own {address}: {error.strerror or error}.",
            rule="The ranks of a node meet at its loopback.",
            fix="Bring it up: ip link set lo up. Look for a firewall's rule if it is.",
        ) from None
    return server
