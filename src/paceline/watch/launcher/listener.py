"""Receives the messages of a node's ranks at a Unix socket."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.watch.protocol.report import Beat
from paceline.watch.protocol.wire import Ask, Message, Unpacker, pack


class Listener:
    """A Unix socket, and the connections of ranks to it."""

    def __init__(self, path: Path) -> None:
        self._lines: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(path))
        listening.listen(128)
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ, None)

    @property
    def ranks(self) -> set[int]:
        """The ranks that are connected and have sent a beat."""
        return set(self._lines)

    def receive(self, seconds: float) -> Iterator[Message]:
        """Yield the messages that arrive within this time; stop after the first batch."""
        for key, _ in self._selector.select(seconds):
            assert isinstance(key.fileobj, socket.socket)
            if key.data is not None:
                yield from self._read(key.fileobj, key.data)
                continue
            connection, _ = key.fileobj.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, Unpacker())

    def ask(self, *, is_full: bool) -> None:
        """Ask all ranks for reports; a rank whose thread does not read buffers a few hundred before this
        fails."""
        for line in self._lines.values():
            with suppress(OSError):
                line.send(pack(Ask(is_full)))

    def close(self) -> None:
        """Close all sockets."""
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _read(self, line: socket.socket, unpacker: Unpacker) -> Iterator[Message]:
        try:
            data = line.recv(1 << 20)
            if not data:
                raise EOFError
            messages = list(unpacker.feed(data))
        except (EOFError, OSError, ValueError):  # the rank has gone, or uses another protocol
            self._selector.unregister(line)
            line.close()
            self._lines = {rank: other for rank, other in self._lines.items() if other is not line}
            return
        for message in messages:
            if isinstance(message, Beat):
                self._lines[message.rank] = line
            yield message
