"""The two-second part of a check: does this node reach the place where nodes meet, and what does it announce.

gloo tells the other ranks an address to connect to: that of the interface in GLOO_SOCKET_IFNAME, else what
the host's name stands for, else the loopback's. A rank that announces a loopback address fails by a timeout.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

import psutil

_PATIENCE_S = 2.0
_GLOO = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"


def describe_meeting(host: str, port: int, environ: Mapping[str, str]) -> str:
    """Return in a sentence or two what this node reaches, and what gloo would announce here.

    Args:
        host: where the nodes meet; empty if that is a folder.
        port: there.
    """
    name = socket.gethostname()
    reached, is_good = (f"{name}: ", True) if not host else _try_path(name, host, port)
    address, why = find_announced(environ)
    is_wrong = is_loopback(address)
    link = "" if not host else (", but " if is_good and is_wrong else "; ")
    text = f"{reached}{link}gloo would announce {address} here ({why})"
    if not is_wrong or (is_good and host and is_loopback(host)):
        return f"{text}."
    return (
        f"{text}, at which other nodes reach themselves. Write the node's address beside its name in "
        f"/etc/hosts, or set {_GLOO} to the interface between the nodes."
    )


def find_announced(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the address that gloo would announce, and why this one."""
    interfaces = psutil.net_if_addrs()
    for name in filter(None, environ.get(_GLOO, "").split(",")):
        for entry in interfaces.get(name, ()):
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                return entry.address.partition("%")[0], f"{_GLOO}={environ[_GLOO]}"
        return _LOOPBACK, f"{_GLOO}={environ[_GLOO]} has no address"
    own = {entry.address.partition("%")[0] for entries in interfaces.values() for entry in entries}
    name = socket.gethostname()
    with suppress(OSError, UnicodeError):
        address = look_up(name)
        if address in own or is_loopback(address):
            return address, f"the name {name} stands for it"
        return _LOOPBACK, f"the name {name} stands for {address}, which is another machine's"
    return _LOOPBACK, f"the name {name} stands for nothing"


def look_up(name: str) -> str:
    """Return the first address of a name, which may have any letters: as gloo does it, without IDNA."""
    found = socket.getaddrinfo(os.fsencode(name), None, type=socket.SOCK_STREAM)
    return str(found[0][4][0]).partition("%")[0]


def _try_path(name: str, host: str, port: int) -> tuple[str, bool]:
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except (OSError, UnicodeError) as error:
        return f"on {name}, {host} does not resolve ({getattr(error, 'strerror', error)})", False
    place = host if host == address[0] else f"{host} ({address[0]})"
    try:
        socket.create_connection((str(address[0]), port), timeout=_PATIENCE_S).close()
    except ConnectionRefusedError:
        return f"{name} reaches {place}, where nothing listens on port {port}", True
    except TimeoutError:
        return (
            f"{name} does not reach {place} on port {port}: no answer in {_PATIENCE_S:g} s, as behind a "
            "firewall that drops packets",
            False,
        )
    except OSError as error:
        return f"{name} does not reach {place} on port {port}: {error.strerror}", False
    return f"{name} reaches {place} on port {port}", True


def is_loopback(host: str) -> bool:
    """Return whether an address, or that of a name, is the own machine's on every machine."""
    with suppress(OSError, UnicodeError):
        return ipaddress.ip_address(look_up(host.partition("%")[0])).is_loopback
    return False
