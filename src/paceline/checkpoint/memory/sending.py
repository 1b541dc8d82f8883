"""Sends shares of states from one memory keeper to that of another node, and receives them.

A copy travels over a TCP connection of its own, by the keepers alone, so it needs neither rank:

    sender to receiver    the receiver's secret, the length of a message, the share as JSON
    receiver to sender    {"problem": ""}, once it has memory for the files
    sender to receiver    the bytes of the files
    receiver to sender    {"problem": ""}, once the copy has the sender's checksums and is published

A receiver has two places for each writer, as the writer itself: a copy replaces the one before the last.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from paceline.checkpoint import files
from paceline.checkpoint.memory.free_memory import read_free_memory
from paceline.units import format_bytes

SECRET_LENGTH = 32
# How long a connection may stand still. A node that has gone answers nothing.
_LINK_S = 10.0
_LENGTH_BYTES = 4

# Writer and slot; the second number of the same pair is replaced only after the first one is whole.
CopyKey = tuple[int, int]


@dataclass(frozen=True)
class CopyTarget:
    """The keeper that receives a rank's copies; JSON-able.

    Attributes:
        host: name of its node, for messages.
        address: of its node.
        port: where it listens.
        secret: that it asks for.
    """

    host: str
    address: str
    port: int
    secret: str

    def dump(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


class _RefusedError(OSError):
    """The error of a copy that the receiver does not take."""


def send_copy(target: CopyTarget, share: dict[str, Any], slot: int, fd: int) -> str:
    """Send a share to another node's keeper; return what went wrong, or "".

    Args:
        target: the keeper.
        share: as JSON, with `files` and `checksums`.
        slot: of the share.
        fd: memory with the files.
    """
    try:
        with socket.create_connection((target.address, target.port), _LINK_S) as link:
            link.sendall(target.secret.encode())
            _send(link, share | {"slot": slot})
            _read_answer(link)
            for _, start, num_bytes in share["files"]:
                end = start + num_bytes
                while start < end:
                    data = os.pread(fd, min(files.CHUNK_BYTES, end - start), start)
                    if not data:
                        raise EOFError("the memory ends early")
                    link.sendall(data)
                    start += len(data)
            _read_answer(link)
    except (OSError, ValueError, EOFError) as error:
        return f"{target.host} ({target.address}): {error}"
    return ""


class CopyReceiver:
    """A receiver of copies, with threads of its own, which closes with the process.

    Args:
        address: of this node, as others reach it.
        secret: that senders must know.
        drop: called before the place of a copy is written over.
        put: called with a copy that has arrived whole, and its memory.

    Attributes:
        port: where it listens.

    Raises:
        OSError: it cannot listen at this address.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        drop: Callable[[CopyKey], None],
        put: Callable[[CopyKey, dict[str, Any], int], None],
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._secret = secret.encode()
        self._drop, self._put = drop, put
        self._memory: dict[CopyKey, int] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link, suppress(OSError, EOFError, ValueError, KeyError, TypeError):
            link.settimeout(_LINK_S)
            if not hmac.compare_digest(bytes(_receive(link, len(self._secret))), self._secret):
                return
            share = _read(link)
            key = int(share["writer"]), int(share.pop("slot"))
            with self._lock:
                self._drop(key)
                fd = self._memory.get(key)
                if fd is None:
                    fd = self._memory[key] = os.memfd_create("paceline-copy", os.MFD_CLOEXEC)
            problem = _reserve(fd, max((start + size for _, start, size in share["files"]), default=0))
            _send(link, {"problem": problem})
            if problem:
                return
            for name, start, num_bytes in share["files"]:
                if _receive_file(link, fd, start, num_bytes) != share["checksums"][name]:
                    _send(link, {"problem": f"{name} arrived with other bytes"})
                    return
            self._put(key, share, fd)
            _send(link, {"problem": ""})


def choose_partners(nodes: Sequence[int], domains: Sequence[str]) -> list[int | None]:
    """Return, for each rank, the rank on another node whose keeper holds its copies; `None` on one node.

    Each node sends to one node and receives from one: the one that is as many places further as gives the
    most pairs in different failure domains, and the next one among equals.

    Args:
        nodes: by rank the number of its node.
        domains: by rank what fails together with its node, empty if unknown.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    ordered = sorted(members)
    if len(ordered) == 1:
        return [None] * len(nodes)
    own = [domains[members[node][0]] for node in ordered]

    def count_apart(shift: int) -> int:
        return sum(own[i] != own[(i + shift) % len(own)] for i in range(len(own)))

    shift = max(range(1, len(ordered)), key=lambda shift: (count_apart(shift), -shift))
    partners: list[int | None] = [None] * len(nodes)
    for place, node in enumerate(ordered):
        targets = members[ordered[(place + shift) % len(ordered)]]
        for local_rank, rank in enumerate(members[node]):
            partners[rank] = targets[local_rank % len(targets)]
    return partners


def choose_refuges(nodes: Sequence[int], leaving: Collection[int]) -> list[int | None]:
    """Return, for each rank of a node that leaves, a rank on a node that stays; `None` for the others.

    Args:
        nodes: by rank the number of its node.
        leaving: numbers of nodes.
    """
    staying = [rank for rank, node in enumerate(nodes) if node not in leaving]
    places = iter(range(len(nodes)))
    return [staying[next(places) % len(staying)] if node in leaving else None for node in nodes]


def _reserve(fd: int, num_bytes: int) -> str:
    """Make memory large enough; return why that is impossible, or ""."""
    lacking, free = num_bytes - os.fstat(fd).st_size, read_free_memory()
    if lacking > free:
        return f"it needs {format_bytes(lacking)} of memory for the copy, and {format_bytes(free)} are free"
    try:
        if lacking > 0:
            os.posix_fallocate(fd, 0, num_bytes)  # fails where writing would kill the process
    except OSError as error:
        return f"it has no memory for {num_bytes:,} bytes ({error.strerror})"
    return ""


def _receive_file(link: socket.socket, fd: int, start: int, num_bytes: int) -> int:
    """Receive bytes into memory and return their CRC-32."""
    buffer = memoryview(bytearray(min(files.CHUNK_BYTES, max(1, num_bytes))))
    end, found = start + num_bytes, 0
    while start < end:
        num_read = link.recv_into(buffer[: min(len(buffer), end - start)])
        if not num_read:
            raise EOFError("the connection ended early")
        found = zlib.crc32(buffer[:num_read], found)
        os.pwrite(fd, buffer[:num_read], start)
        start += num_read
    return found


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    link.sendall(len(text).to_bytes(_LENGTH_BYTES, "big") + text)


def _read(link: socket.socket) -> dict[str, Any]:
    length = int.from_bytes(_receive(link, _LENGTH_BYTES), "big")
    message: dict[str, Any] = json.loads(_receive(link, length))
    return message


def _read_answer(link: socket.socket) -> None:
    """Read the receiver's answer, and raise the problem that it reports."""
    if problem := _read(link)["problem"]:
        raise _RefusedError(str(problem))


def _receive(link: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray()
    while len(data) < num_bytes:
        part = link.recv(min(files.CHUNK_BYTES, num_bytes - len(data)))
        if not part:
            raise EOFError("the connection ended early")
        data += part
    return data
