"""Carries messages between launchers over TCP, in one thread that also drives their `Membership`.

A message is a JSON object behind its length. Nothing that arrives is executed or unpickled.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

log = logging.getLogger(__name__)

Message = dict[str, Any]
_LENGTH = struct.Struct(">I")
_MOST_BYTES = 1 << 22
_FLUSH_S = 1.0
_CHUNK_BYTES = 65536


class Receiver(Protocol):
    """The protocol that the thread drives; `now` is the monotonic clock of this machine.

    Attributes:
        rests_until_s: time of the next tick if no call is posted before; the receiver changes it with what
            arrives, and in the past it means that ticks go on at the interval of `Wire`.
    """

    rests_until_s: float

    def opened(self, link: int, now: float) -> None:
        """Handle a dialled link that is open."""

    def received(self, link: int, message: Message, now: float) -> None:
        """Handle a message."""

    def ended(self, link: int, refused: bool, now: float) -> None:
        """Handle the end of a link; `refused` if no launcher listens at that port."""

    def tick(self, now: float) -> None:
        """Handle the passing of time."""


def pack(message: Message) -> bytes:
    """Return a message's bytes."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def unpack(data: bytearray) -> list[Message]:
    """Take the complete messages out of received bytes.

    Raises:
        ValueError: it is not a message.
    """
    found = []
    while len(data) >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(data)
        if size > _MOST_BYTES:
            raise ValueError(f"a message of {size} bytes")
        if len(data) < _LENGTH.size + size:
            break
        message = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + size]))
        if not isinstance(message, dict):
            raise ValueError("not an object")
        found.append(message)
        del data[: _LENGTH.size + size]
    return found


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, kind, number, _, where = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0]
    made = socket.socket(family, kind, number)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(512)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


@dataclass
class _Link:
    socket: socket.socket | None
    is_open: bool
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    closes_by_s: float | None = None


class Wire:
    """The links of one launcher; `Membership` calls `dial`, `send` and `close` in the thread of `start`."""

    def __init__(self, listener: socket.socket, tick_s: float) -> None:
        self._listener = listener
        self._tick_s = tick_s
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, _Link] = {}
        self._count = 0
        self._posted: deque[Callable[[], None]] = deque()
        self._was_posted = False
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._ends_by_s: float | None = None
        self._has_ended = threading.Event()

    def start(self, receiver: Receiver) -> None:
        """Start the thread."""
        self._receiver = receiver
        threading.Thread(target=self._run, name="paceline-members", daemon=True).start()

    def post(self, call: Callable[[], None]) -> None:
        """Schedule a call of a function in the link thread; any thread may do so."""
        self._posted.append(call)
        with suppress(OSError):  # full: it wakes anyway
            os.write(self._wake, b"x")

    def end(self) -> None:
        """Send what is still to be sent, for a second at most, and end the thread."""
        if threading.current_thread().name != "paceline-members":
            self.post(self._end_soon)
            self._has_ended.wait(2 * _FLUSH_S)

    # ---- for the receiver

    def dial(self, address: str, port: int) -> int:
        """Begin to connect; `opened` or `ended` follows."""
        self._count += 1
        link = self._count
        self._links[link] = _Link(None, False)
        host = "127.0.0.1" if address == "localhost" else address
        try:
            ipaddress.ip_address(host)
        except ValueError:
            # A name may take seconds to resolve, and may have another address than before.
            threading.Thread(target=self._resolve, args=(link, host, port), daemon=True).start()
        else:
            self._connect(link, host, port)
        return link

    def send(self, link: int, message: Message) -> None:
        """Send a message, as soon as the other end takes it."""
        self._send(link, pack(message))

    def send_all(self, links: Iterable[int], message: Message) -> None:
        """Send the same message on several links."""
        data = pack(message)
        for link in links:
            self._send(link, data)

    def _send(self, link: int, data: bytes) -> None:
        state = self._links.get(link)
        if state is None or state.closes_by_s is not None:
            return
        is_waiting = bool(state.outgoing)
        state.outgoing += data
        if state.is_open and state.socket is not None and not is_waiting:
            # Usually the other end takes it at once. An error shows again when the link is written to.
            with suppress(OSError):
                del state.outgoing[: state.socket.send(state.outgoing)]
            if not state.outgoing:
                return
        self._watch(link, state)

    def close(self, link: int) -> None:
        """Close a link when its messages have been sent; `ended` does not follow."""
        state = self._links.get(link)
        if state is None:
            return
        state.closes_by_s = time.monotonic() + (_FLUSH_S if state.is_open and state.outgoing else 0.0)
        self.post(self._close_finished)

    # ---- the thread

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._selector.register(self._wakes, selectors.EVENT_READ, "wake")
        ticks_s = time.monotonic()
        while self._ends_by_s is None or (self._pending() and time.monotonic() < self._ends_by_s):
            try:
                due_s = ticks_s if self._was_posted else max(ticks_s, self._receiver.rests_until_s)
                for key, mask in self._selector.select(max(0.0, due_s - time.monotonic())):
                    self._handle(key.data, mask)
                while self._posted:
                    self._was_posted = True
                    self._posted.popleft()()
                now = time.monotonic()
                if now >= ticks_s and (self._was_posted or now >= self._receiver.rests_until_s):
                    self._was_posted = False
                    self._receiver.tick(now)
                    self._close_finished()
                    ticks_s = time.monotonic() + self._tick_s
            except Exception:
                # The thread must not die silently: without it, this node would be lost to the others.
                log.exception("an error in the exchange with the other nodes")
                ticks_s = time.monotonic() + self._tick_s
        for link in list(self._links):
            self._drop(link)
        self._listener.close()
        self._has_ended.set()

    def _pending(self) -> bool:
        return any(state.is_open and state.outgoing for state in self._links.values())

    def _end_soon(self) -> None:
        self._ends_by_s = time.monotonic() + _FLUSH_S

    def _handle(self, what: str | int, mask: int) -> None:
        if what == "wake":
            os.read(self._wakes, _CHUNK_BYTES)
        elif what == "listener":
            with suppress(OSError):
                made, _ = self._listener.accept()
                self._count += 1
                self._links[self._count] = self._prepare(made, is_open=True)
                self._watch(self._count, self._links[self._count])
        elif isinstance(what, int) and what in self._links:
            if mask & selectors.EVENT_WRITE:
                self._write(what)
            if mask & selectors.EVENT_READ and what in self._links:
                self._read(what)

    @staticmethod
    def _prepare(made: socket.socket, *, is_open: bool) -> _Link:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Link(made, is_open)

    def _resolve(self, link: int, host: str, port: int) -> None:
        address = ""
        with suppress(OSError):
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            address = str(sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0][4][0])
        self.post(lambda: self._connect(link, address, port))

    def _connect(self, link: int, address: str, port: int) -> None:
        state = self._links.get(link)
        if state is None or state.closes_by_s is not None:
            return
        if not address:
            self._fail(link)
            return
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        state.socket = self._prepare(made, is_open=False).socket
        number = made.connect_ex((address, port))
        if number in (0, errno.EINPROGRESS):
            self._watch(link, state)
        else:
            # Not from within `dial`, whose caller does not have the link yet.
            self.post(lambda: self._fail(link, refused=number == errno.ECONNREFUSED))

    def _write(self, link: int) -> None:
        state = self._links[link]
        assert state.socket is not None
        if not state.is_open:
            number = state.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self._fail(link, refused=number == errno.ECONNREFUSED)
                return
            state.is_open = True
            self._receiver.opened(link, time.monotonic())
        try:
            if state.outgoing:
                del state.outgoing[: state.socket.send(state.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._fail(link)
            return
        self._watch(link, state)

    def _read(self, link: int) -> None:
        state = self._links[link]
        assert state.socket is not None
        try:
            data = state.socket.recv(_CHUNK_BYTES)
            state.incoming += data
            messages = unpack(state.incoming)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._fail(link)
            return
        for message in messages:
            if link in self._links and state.closes_by_s is None:
                self._receiver.received(link, message, time.monotonic())
        if not data:
            self._fail(link)

    def _watch(self, link: int, state: _Link) -> None:
        if state.socket is None or link not in self._links:
            return
        mask = selectors.EVENT_READ if state.is_open else 0
        mask |= selectors.EVENT_WRITE if state.outgoing or not state.is_open else 0
        try:
            self._selector.modify(state.socket, mask, link)
        except KeyError:
            self._selector.register(state.socket, mask, link)

    def _fail(self, link: int, *, refused: bool = False) -> None:
        state = self._links.get(link)
        self._drop(link)
        if state is not None and state.closes_by_s is None:
            self._receiver.ended(link, refused, time.monotonic())

    def _close_finished(self) -> None:
        now = time.monotonic()
        for link, state in list(self._links.items()):
            if state.closes_by_s is not None and (not state.outgoing or now >= state.closes_by_s):
                self._drop(link)

    def _drop(self, link: int) -> None:
        state = self._links.pop(link, None)
        if state is not None and state.socket is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(state.socket)
            state.socket.close()
