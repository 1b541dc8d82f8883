"""Finds the address at which other nodes reach this one."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil

# Any port does: nothing is sent to it.
_PORT = 9


def find_own_address(environ: Mapping[str, str]) -> str:
    """Return this node's address: that of gloo's interface, else of the route to `MASTER_ADDR`.

    Args:
        environ: of a rank.

    Raises:
        OSError: there is no such interface or route.
    """
    interfaces = psutil.net_if_addrs()
    for name in environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        entries = interfaces.get(name, [])
        for family in (socket.AF_INET, socket.AF_INET6):
            for entry in entries:
                if entry.family == family and "%" not in entry.address:
                    return str(entry.address)
    family, _, _, _, target = socket.getaddrinfo(
        environ.get("MASTER_ADDR", "localhost"), _PORT, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing: it only finds the route
        return str(probe.getsockname()[0])
