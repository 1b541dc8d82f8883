"""Receives the messages of a node's ranks at a Unix socket."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.watch.protocol.report import Beat
from paceline.watch.protocol.wire import Ask, Message, Unpacker, pack


class _RankConnection:
    """The connection to one rank's thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._unpacker = Unpacker()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived.

        Raises:
            EOFError: the rank has gone.
            OSError, ValueError: the connection is broken, or uses another protocol.
        """
        data = self.socket.recv(1 << 20)
        if not data:
            raise EOFError
        return list(self._unpacker.feed(data))


class Listener:
    """A Unix socket, and the connections of ranks to it.

    Args:
        path: of the socket.
    """

    def __init__(self, path: Path) -> None:
        self._lines: dict[int, _RankConnection] = {}
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
            if key.data is not None:
                yield from self._read(key.data)
                continue
            assert isinstance(key.fileobj, socket.socket)
            connection, _ = key.fileobj.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, _RankConnection(connection))

    def ask(self, *, is_full: bool) -> None:
        """Ask all ranks for reports; a rank whose thread does not read buffers a few hundred before this
        fails."""
        for line in self._lines.values():
            with suppress(OSError):
                line.socket.send(pack(Ask(is_full)))

    def close(self) -> None:
        """Close all sockets."""
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _read(self, line: _RankConnection) -> Iterator[Message]:
        try:
            messages = line.receive()
        except (EOFError, OSError, ValueError):
            self._selector.unregister(line.socket)
            line.socket.close()
            self._lines = {rank: other for rank, other in self._lines.items() if other is not line}
            return
        for message in messages:
            if isinstance(message, Beat):
                self._lines[message.rank] = line
            yield message
