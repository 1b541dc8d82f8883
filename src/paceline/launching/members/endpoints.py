"""Reads `--rdzv-endpoint`: one place where the nodes of a job meet, or several."""

from __future__ import annotations

from paceline.errors import PacelineError
from paceline.launching.members.records import Address

DEFAULT_PORT = 29400
"""torch's port for `c10d`."""


def read_endpoints(text: str, default_port: int = DEFAULT_PORT) -> list[Address]:
    """Return the hosts and ports of an endpoint such as `node0`, `node0:29400,node1` or `[::1]:29400`.

    A host without a port has the port of the last one that has one, or else the default one.

    Raises:
        PacelineError: PL377 for a port that is none.
    """
    found: list[tuple[str, int | None]] = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        host, mark, port = part.rpartition(":")
        if not mark or part.endswith("]") or (part.count(":") > 1 and not part.startswith("[")):
            host, port = part, ""
        if port and not (port.isdigit() and 0 < int(port) < 1 << 16):
            raise PacelineError(
                "PL377",
                saw=f"--rdzv-endpoint {text}: {port!r} is not a port at which several nodes can meet.",
                rule="It is HOST, HOST:PORT or several of them, separated by commas; ports are 1 to 65535.",
                fix=f"Use for example --rdzv-endpoint {host or 'node0'}:{default_port}.",
            )
        found.append((host.strip("[]"), int(port) if port else None))
    last = next((port for _, port in reversed(found) if port is not None), default_port)
    return [(host, last if port is None else port) for host, port in found] or [("localhost", default_port)]
