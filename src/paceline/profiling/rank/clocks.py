"""Measures how far a machine's clock is ahead of the first rank's, by small messages.

Protocol: the first rank listens and answers every byte with its time. Another one notes its own time before
and after, so its offset is known within half of the round trip; the shortest of many counts. This is how NTP
and Intel's Trace Collector compare clocks.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_ROUNDS = 300
_MOST_S = 0.5
_SIZE = 20

Now = Callable[[], int]


class ClockServer:
    """A thread that answers with this process's time.

    Args:
        now: returns nanoseconds since 1970.
        host: the address to listen at; all by default.

    Attributes:
        port: where it listens.
    """

    def __init__(self, now: Now = time.time_ns, host: str = "") -> None:
        self._now = now
        self._socket = socket.create_server((host, 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, name="paceline-clock", daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1):
                connection.sendall(b"%*d" % (_SIZE, self._now()))


def measure_clock(address: tuple[str, int], now: Now = time.time_ns) -> tuple[int, int]:
    """Return the nanoseconds by which this clock is ahead of a server's, and the largest error of that.

    Args:
        address: of a `ClockServer`.
        now: this clock.

    Raises:
        OSError: if the server does not answer.
    """
    best = None
    with socket.create_connection(address, timeout=5.0) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until = time.monotonic() + _MOST_S
        for _ in range(_ROUNDS):
            before = now()
            connection.sendall(b"?")
            data = b""
            while len(data) < _SIZE:
                part = connection.recv(_SIZE - len(data))
                if not part:
                    raise ConnectionError("the clock's server has gone")
                data += part
            after = now()
            trip = after - before
            if best is None or trip < best[0]:
                best = trip, (before + after) // 2 - int(data)
            if time.monotonic() > until:
                break
    assert best is not None
    return best[1], best[0] // 2 + 1


def join_measurements(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """Return the offset between two measurements, with the drift from one to the other as an error."""
    (ahead, error), (later, later_error) = first, second
    return (ahead + later) // 2, max(error, later_error) + abs(later - ahead + 1) // 2
