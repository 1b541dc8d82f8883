"""Messages between the nodes of a check: JSON of limited size behind its length."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
_MOST_BYTES = 1 << 20
# Passes where larger packets are lost, so that the nodes can say that they are.
_SMALL_PACKET = 500


def listen(port: int) -> socket.socket:
    """Listen for nodes at a port, on all addresses."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    listener = socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_PACKET)
    return listener


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to the first node."""
    error: OSError = OSError("no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_PACKET)
            connection.connect(address)
            return connection
        except OSError as failure:
            connection.close()
            error = failure
    raise error


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message; an OSError if the other side is gone."""
    text = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Return the next message.

    Raises:
        OSError: the other side is gone, silent beyond the connection's timeout, or does not speak this
        language.
    """
    (length,) = _LENGTH.unpack(read_exactly(connection, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ConnectionError(f"a message of {length} bytes")
    try:
        message = json.loads(read_exactly(connection, length))
    except (ValueError, RecursionError):
        raise ConnectionError("a message that is no JSON") from None
    if not isinstance(message, dict):
        raise ConnectionError("a message of another form")
    return message


def read_exactly(connection: socket.socket, length: int) -> bytes:
    """Return so many bytes, or raise a ConnectionError at the end of the stream."""
    found = bytearray()
    while len(found) < length:
        piece = connection.recv(length - len(found))
        if not piece:
            raise ConnectionError("the other side has ended")
        found += piece
    return bytes(found)
