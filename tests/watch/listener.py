"""A launcher's end of the watch, for tests: hears ranks, and asks them when one of them says so.

A rank calls `ask_all` with the listener's folder. It returns when all ranks that are connected have answered.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from pathlib import Path
from types import TracebackType

from paceline.watch.report import Beat, Report
from paceline.watch.wire import Ask, Unpacker, pack


def ask_all(folder: str, seconds: float = 10.0) -> None:
    """In a rank: has all ranks asked for reports, and waits for these."""
    Path(folder, "ask").touch()
    end = time.monotonic() + seconds
    while Path(folder, "ask").exists():
        assert time.monotonic() < end, "not all ranks have answered"
        time.sleep(0.01)


class _Line:
    """The connection to a rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._unpacker = Unpacker()

    def receive(self) -> list[Beat | Report]:
        """The messages that have come; raises EOFError once the rank has hung up."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise EOFError
        return [message for message in self._unpacker.feed(data) if not isinstance(message, Ask)]

    def ask(self) -> None:
        self.socket.sendall(pack(Ask()))


class Listener:
    """Hears ranks from `__enter__` on.

    Attributes:
        folder: for `ask_all`.
        socket: the path where it listens.
        beats: all that came, by rank.
        reports: the latest, by rank.
        hung_up: ranks that have closed their connection.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.folder = str(folder)
        self.socket = str(folder / "s")
        self.beats: dict[int, list[Beat]] = {}
        self.reports: dict[int, Report] = {}
        self.hung_up: set[int] = set()
        self._num_ranks = num_ranks
        self._lines: dict[int, _Line] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._selector = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> Listener:
        self._listening.bind(self.socket)
        self._listening.listen()
        self._selector.register(self._listening, selectors.EVENT_READ, None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def wait_for_beats(self, rank: int, count: int, seconds: float = 10.0) -> list[Beat]:
        """Waits until a rank has beaten so many times."""
        end = time.monotonic() + seconds
        while len(self.beats.get(rank, ())) < count:
            assert time.monotonic() < end, f"{self.beats}"
            time.sleep(0.01)
        return self.beats[rank]

    def wait_for_hang_up(self, rank: int, seconds: float = 10.0) -> None:
        """Waits until a rank has closed its connection."""
        end = time.monotonic() + seconds
        while rank not in self.hung_up:
            assert time.monotonic() < end, "still connected"
            time.sleep(0.01)

    def ask(self, rank: int) -> None:
        """Asks one rank."""
        self.reports.pop(rank, None)
        self._lines[rank].ask()

    def wait_for_report(self, rank: int, seconds: float = 10.0) -> Report:
        """Waits until a rank has answered."""
        end = time.monotonic() + seconds
        while rank not in self.reports:
            assert time.monotonic() < end, "no report"
            time.sleep(0.01)
        return self.reports[rank]

    def _run(self) -> None:
        wanted = Path(self.folder, "ask")
        is_asking = False
        while not self._ends.is_set():
            for key, _ in self._selector.select(0.02):
                if key.data is None:
                    connection, _ = self._listening.accept()
                    connection.setblocking(False)
                    self._selector.register(connection, selectors.EVENT_READ, _Line(connection))
                else:
                    self._read(key.data)
            if wanted.exists() and len(self._lines) == self._num_ranks and not is_asking:
                is_asking = True
                self.reports.clear()
                for line in self._lines.values():
                    line.ask()
            if is_asking and len(self.reports) == self._num_ranks:
                is_asking = False
                wanted.unlink()

    def _read(self, line: _Line) -> None:
        try:
            messages = line.receive()
        except (EOFError, OSError):
            self.hung_up |= {rank for rank, other in self._lines.items() if other is line}
            self._selector.unregister(line.socket)
            line.socket.close()
            return
        for message in messages:
            self._lines[message.rank] = line
            if isinstance(message, Beat):
                self.beats.setdefault(message.rank, []).append(message)
            else:
                self.reports[message.rank] = message
