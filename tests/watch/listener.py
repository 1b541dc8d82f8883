"""A launcher's end of the watch, for tests: hears ranks, and asks them when one of them says so.

A rank calls `ask_all` with the listener's folder. It returns when all ranks that are connected have answered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from paceline.watch.launcher import listener
from paceline.watch.protocol.report import Beat, Report


def ask_all(folder: str, seconds: float = 10.0) -> None:
    """In a rank: has all ranks asked for reports, and waits for these."""
    Path(folder, "ask").touch()
    end = time.monotonic() + seconds
    while Path(folder, "ask").exists():
        assert time.monotonic() < end, "not all ranks have answered"
        time.sleep(0.01)


class Listener:
    """Hears ranks in a thread, from `__enter__` on.

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
        self.closing: dict[int, Report] = {}
        self.hung_up: set[int] = set()
        self._num_ranks = num_ranks
        self._is_asked = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Listener:
        self._listener = listener.Listener(Path(self.socket))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()
        self._listener.close()

    def wait_for_beats(self, rank: int, count: int, seconds: float = 10.0) -> list[Beat]:
        """Wait until a rank has beaten so many times."""
        wait_until(lambda: len(self.beats.get(rank, ())) >= count, seconds)
        return self.beats[rank]

    def wait_for_hang_up(self, rank: int, seconds: float = 10.0) -> None:
        """Wait until a rank has closed its connection."""
        wait_until(lambda: rank in self.hung_up, seconds)

    def ask(self) -> None:
        """Ask all ranks; what they have answered before is forgotten."""
        self.reports.clear()
        self._is_asked.set()

    def wait_for_report(self, rank: int, seconds: float = 10.0) -> Report:
        """Wait until a rank has answered."""
        wait_until(lambda: rank in self.reports, seconds)
        return self.reports[rank]

    def _run(self) -> None:
        wanted = Path(self.folder, "ask")
        is_waiting = False
        while not self._ends.is_set():
            before = self._listener.ranks
            for message in self._listener.receive(0.02):
                if isinstance(message, Beat):
                    self.beats.setdefault(message.rank, []).append(message)
                elif isinstance(message, Report) and message.is_closing:
                    self.closing[message.rank] = message  # nobody has asked for it
                elif isinstance(message, Report):
                    self.reports[message.rank] = message
            self.hung_up |= before - self._listener.ranks
            if wanted.exists() and len(self._listener.ranks) == self._num_ranks and not is_waiting:
                is_waiting = True
                self.ask()
            if self._is_asked.is_set():
                self._is_asked.clear()
                self._listener.ask(is_full=False)
            if is_waiting and len(self.reports) == self._num_ranks:
                is_waiting = False
                wanted.unlink()


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    """Fail where something isn't so in time."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.01)
