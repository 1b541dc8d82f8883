"""One case of the launcher's suites."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """A run under test.

    Attributes:
        suite: A to D.
        row: the line of the table that it counts in.
        name: distinguishes it from others of its row.
        check: runs it in a folder of its own; raises AssertionError where it is not as it must be.
        is_peer: whether it shows what torchrun does, which proves nothing about us.
    """

    suite: str
    row: str
    name: str
    check: Callable[[Path], None]
    is_peer: bool = False


def free_port() -> int:
    """Return a port at the loopback address that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
