"""Reads `--rdzv-endpoint`: the host and port of a store, or those of several servers."""

from __future__ import annotations

from paceline.errors import PacelineError

Address = tuple[str, int]
STORES = ("etcd", "folder")
"""Backends whose store is outside of the nodes; each node needs its own address."""
DEFAULT_PORT = 29400
"""torch's port for `c10d`."""


def read_endpoints(text: str, default_port: int = DEFAULT_PORT) -> list[Address]:
    """Return the hosts and ports of an endpoint such as `node0`, `node0:29400,node1` or `[::1]:29400`.

    A host without a port has the port of the last one that has one, or else the default one.
    """
    found: list[tuple[str, int | None]] = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        host, mark, port = part.rpartition(":")
        if not mark or part.endswith("]") or (part.count(":") > 1 and not part.startswith("[")):
            host, port = part, ""
        if port and not (port.isdigit() and 0 < int(port) < 1 << 16):
            raise PacelineError(
                "PL380",
                saw=f"--rdzv-endpoint {text}: {port!r} is not a port at which several nodes can meet.",
                rule="It is HOST, HOST:PORT or several of them, separated by commas; ports are 1 to 65535.",
                fix=f"Use for example --rdzv-endpoint {host or 'node0'}:{default_port}.",
            )
        found.append((host.strip("[]"), int(port) if port else None))
    last = next((port for _, port in reversed(found) if port is not None), default_port)
    return [(host, last if port is None else port) for host, port in found] or [("localhost", default_port)]


def read_endpoint(text: str) -> Address:
    """Return the host and port of the endpoint of c10d."""
    found = read_endpoints(text)
    if len(found) > 1:
        raise PacelineError(
            "PL380",
            saw=f"--rdzv-endpoint {text} with --rdzv-backend c10d.",
            rule="The store of c10d is on one node.",
            fix=f"Use --rdzv-endpoint {found[0][0]}:{found[0][1]}. For a job that survives the loss of any "
            "node, use --rdzv-backend etcd or folder.",
        )
    return found[0]
