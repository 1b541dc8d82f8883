"""Measures a link by plain TCP connections of its own, before gloo or NCCL can hang in it."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from statistics import median
from typing import Any

from paceline.doctor.cluster.node_messages import read_exactly

_ECHO, _SINK = b"e", b"s"
_COUNTED = struct.Struct(">Qd")
_WORD = 8
_CHUNK = bytes(1 << 18)
_PATIENCE_S = 4.0
# More than one packet of any size, and less than a second on a link of 1 Mbit/s.
_LARGE = 1 << 16
_NUM_ECHOES = 15
# Linux's struct tcp_info: 8 bytes, then numbers of 32 bits.
_SENT_MSS, _RESENT, _TCP_INFO_BYTES = 2, 23, 8 + 4 * 24


class LinkServer:
    """Answers the measurements of other nodes until it is closed."""

    def __init__(self) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=64
        )
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        connection.settimeout(2 * _PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if read_exactly(connection, 1) == _ECHO:
            while True:
                connection.sendall(read_exactly(connection, _WORD))
        count, started_s = 0, 0.0
        while piece := connection.recv(len(_CHUNK)):
            count += len(piece)
            started_s = started_s or time.perf_counter()
        elapsed_s = time.perf_counter() - started_s if started_s else 0.0
        connection.sendall(_COUNTED.pack(count, elapsed_s))


def reach(address: str, port: int) -> dict[str, Any]:
    """Try a connection, a small message and one of many packets.

    Returns:
        `{}` if all went well, else `{"stage": "connect" | "small" | "large", "error": text}`.
    """
    stage = "connect"
    try:
        with _connect(address, port) as connection:
            stage = "small"
            connection.sendall(_ECHO + bytes(_WORD))
            read_exactly(connection, _WORD)
        with _connect(address, port) as connection:
            stage = "large"
            connection.sendall(_SINK + _CHUNK[:_LARGE])
            connection.shutdown(socket.SHUT_WR)
            _COUNTED.unpack(read_exactly(connection, _COUNTED.size))
    except OSError as error:
        return {"stage": stage, "error": error.strerror or str(error)}
    return {}


def measure(address: str, port: int, seconds: float) -> dict[str, Any]:
    """Send as fast as possible for so many seconds, after some echoes.

    Returns:
        `rtt_s` (the median round trip), `bytes_per_s` as the receiver counted them, and `resent`, the share
        of packets that were sent again; `{"error": text}` if the link failed meanwhile.
    """
    try:
        with _connect(address, port) as connection:
            connection.sendall(_ECHO)
            echoes = [_time_echo(connection) for _ in range(_NUM_ECHOES)]
        with _connect(address, port) as connection:
            connection.sendall(_SINK)
            end_s = time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                connection.sendall(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            count, elapsed_s = _COUNTED.unpack(read_exactly(connection, _COUNTED.size))
            resent = _read_resent(connection, count)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"rtt_s": median(echoes), "bytes_per_s": count / max(elapsed_s, 1e-6), "resent": resent}


def _connect(address: str, port: int) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=_PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _time_echo(connection: socket.socket) -> float:
    started_s = time.perf_counter()
    connection.sendall(bytes(_WORD))
    read_exactly(connection, _WORD)
    return time.perf_counter() - started_s


def _read_resent(connection: socket.socket, num_bytes: int) -> float:
    """Return the share of packets that were sent again, 0 where the kernel does not say."""
    with suppress(OSError, AttributeError, struct.error):
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        numbers = struct.unpack(f"@8x{(len(found) - 8) // 4}I", found)
        return float(numbers[_RESENT] * max(numbers[_SENT_MSS], 1) / max(num_bytes, 1))
    return 0.0
