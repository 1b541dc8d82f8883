"""The launcher's side: hears the ranks, decides when they are stuck, and says why.

A thread of the launcher. Each rank connects to a Unix socket in the launch's folder, sends a `Beat` every
second and a `Report` when asked. Where a rank can't answer, because its main thread holds Python's lock in
compiled code, a signal has its interpreter write its stacks into a file.
"""

from __future__ import annotations

import linecache
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.launch.watching import SOCKET, Watched, name_stacks
from paceline.watch.clock import STALL_S, Clock, Stillness
from paceline.watch.hang import explain_hang
from paceline.watch.mismatch import find_mismatch
from paceline.watch.nodes import EVERY_S, Board, NodeState, join_stillness, merge
from paceline.watch.process import Eyes
from paceline.watch.render import render, render_place
from paceline.watch.report import Beat, Frame, Process, Report, Seen, Verdict
from paceline.watch.stacks import read_main_stack
from paceline.watch.wire import Ask, Message, Unpacker, pack

# How often the ranks' processes are looked at.
_LOOK_S = 1.0
# How long a rank has to answer; its thread may wait for Python's lock.
_ANSWER_S = 2.0


class _Line:
    """The connection to one rank's thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._unpacker = Unpacker()

    def receive(self) -> list[Message]:
        """What has come.

        Raises:
            EOFError: the rank has gone.
            OSError, ValueError: the connection is broken, or speaks something else.
        """
        data = self.socket.recv(1 << 20)
        if not data:
            raise EOFError
        return list(self._unpacker.feed(data))

    def ask(self) -> None:
        """Asks for a report; a rank whose thread doesn't read takes a few hundred before this fails."""
        self.socket.send(pack(Ask()))


class RankWatcher:
    """Watches this node's ranks; see `launch.watching.Watcher`.

    Args:
        hang_after_s: how long all ranks must stand still until they are taken for stuck.
        keep_alive: whether a stuck job is left as it is, for a debugger; the verdict is told by `tell`.
        tell: prints a verdict that doesn't end the job.
    """

    entry = "paceline.watch.rank:begin"

    def __init__(self, hang_after_s: float, *, keep_alive: bool, tell: Callable[[str], None]) -> None:
        self.told = self.told_of_others = ""
        self._hang_after_s = hang_after_s
        self._keep_alive = keep_alive
        self._tell = tell
        self._look: Callable[[], Sequence[Watched]] = tuple
        self._node_name = socket.gethostname()
        self._eyes = Eyes(self._node_name)
        self._clock = Clock(time.monotonic())
        self._lines: dict[int, _Line] = {}
        self._processes: dict[int, Process] = {}
        self._reports: dict[int, Report] = {}
        self._asked_at_s = 0.0
        self._was_stuck = False
        self._board: Board | None = None
        self._has_spoken = False
        self._ends = threading.Event()
        self._failed = threading.Event()
        self._looked_back = threading.Event()
        self._selector: selectors.BaseSelector
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)

    def begin(self, folder: Path, look: Callable[[], Sequence[Watched]]) -> None:
        """Starts the thread; ranks that start from now on find the socket."""
        self._look = look
        self._selector = selectors.DefaultSelector()  # here, so that no rank inherits it
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(folder / SOCKET))
        listener.listen(128)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._thread.start()

    def meet(self, node: int, num_nodes: int, host: str, port: int, attempt: int) -> None:
        """Ranks start, on so many nodes; what was known of those before is of no use."""
        self._clock = Clock(time.monotonic())
        self._failed.clear()
        self._looked_back.clear()
        if self._board is not None:
            self._board.close()
        self._board = Board(node, num_nodes, host, port, str(attempt)) if num_nodes > 1 else None

    def note_failure(self) -> None:
        """Asks the ranks that are left where they are; once, as the others fail because of the first."""
        if not self._failed.is_set() and self._thread.is_alive():
            self._failed.set()
            self._looked_back.wait(_ANSWER_S + 1.0)

    def end(self) -> None:
        """Stops the thread and closes the sockets."""
        self._ends.set()
        if self._board is not None:
            self._board.close()
        if self._thread.ident is not None:
            self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    # ---- hearing

    def _run(self) -> None:
        looked_s = 0.0
        while not self._ends.is_set():
            self._hear(0.25)
            now_s = time.monotonic()
            if self._failed.is_set() and not self._looked_back.is_set():
                self._look_back()
            if now_s - looked_s >= _LOOK_S:
                looked_s = now_s
                self._look_around(now_s)
            if not self._has_spoken and not self._failed.is_set():
                self._judge(now_s)

    def _hear(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                assert isinstance(key.fileobj, socket.socket)
                connection, _ = key.fileobj.accept()
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ, _Line(connection))
            else:
                self._read(key.data)

    def _read(self, line: _Line) -> None:
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
                self._clock.note_beat(message, time.monotonic())
            elif isinstance(message, Report):
                self._reports[message.rank] = message

    def _look_around(self, now_s: float) -> None:
        before = self._processes
        self._processes = self._eyes.look(self._look())
        if _describe(before) != _describe(self._processes):
            self._clock.note_change(now_s)
        self._clock.note_processes(self._processes, now_s)

    def _look_back(self) -> None:
        try:
            seen = self._collect()
            verdict = self._find_mismatch(seen) or explain_hang(seen, _read_source)
            if verdict is not None:
                lost = {rank for rank, process in seen.processes.items() if process.state == "ended"}
                places = [place for place in verdict.places if not lost.issuperset(place.ranks)]
                self.told_of_others = "\n".join(["Meanwhile:", *map(render_place, places)])
        finally:
            self._looked_back.set()

    # ---- judging

    def _judge(self, now_s: float) -> None:
        if not self._processes or all(p.state == "ended" for p in self._processes.values()):
            return
        own = self._clock.read(now_s)
        others = self._board.read() if self._board is not None else {}
        for state, _ in others.values():
            if state is not None and state.told:
                self._speak(state.told, is_heard=True)
                return
        stillness = join_stillness(own, others)
        is_stuck = stillness.is_stuck(self._hang_after_s)
        if not is_stuck and not stillness.is_stalled:
            self._asked_at_s = 0.0
            self._publish(own, None)
            return
        every_s = STALL_S if is_stuck else 5 * STALL_S
        if now_s - self._asked_at_s < every_s and is_stuck == self._was_stuck:
            return
        self._asked_at_s, self._was_stuck = now_s, is_stuck
        seen = replace(self._collect(), quiet_s=stillness.still_s)
        self._publish(own, seen)
        seen, is_complete = merge(seen, others)
        verdict = self._find_mismatch(seen)
        if verdict is None and is_stuck and is_complete:
            verdict = explain_hang(seen, _read_source)
        if verdict is not None:
            self._speak(render(verdict))

    def _publish(self, own: Stillness, seen: Seen | None, told: str = "") -> None:
        if self._board is not None:
            self._board.publish(NodeState(self._node_name, tuple(self._processes), own, seen, told))

    def _find_mismatch(self, seen: Seen) -> Verdict | None:
        groups = {name: group for report in seen.reports.values() for name, group in report.groups.items()}
        calls = {rank: report.calls for rank, report in seen.reports.items()}
        return find_mismatch(calls, groups, _read_source)

    def _speak(self, text: str, *, is_heard: bool = False) -> None:
        """Says a verdict of its own, or one that it has heard from another node.

        The other nodes are given time to hear it, before this one's ranks end and theirs lose them.
        """
        self._has_spoken = True
        if self._board is not None and not is_heard:
            self._publish(self._clock.read(time.monotonic()), None, text)
            self._ends.wait(3 * EVERY_S)
        if self._keep_alive:
            self._tell(text)
        else:
            self.told = text

    def _collect(self) -> Seen:
        """Asks all ranks for reports, and gives what came."""
        self._reports = {}
        for line in self._lines.values():
            with suppress(OSError):
                line.ask()
        ends_s = time.monotonic() + _ANSWER_S
        self._processes = self._eyes.look(self._look())
        living = {r for r, process in self._processes.items() if process.state not in ("stopped", "ended")}
        expected = living & self._lines.keys()
        while (expected & self._lines.keys()) - self._reports.keys() and time.monotonic() < ends_s:
            self._hear(0.05)
        self._processes = self._eyes.look(self._look())
        silent = [p for r, p in self._processes.items() if r in expected and r not in self._reports]
        processes = self._processes | {p.rank: replace(p, native=self._read_stack(p)) for p in silent}
        world_size = max((watched.world_size for watched in self._look()), default=0)
        return Seen(world_size, processes, dict(self._reports))

    def _read_stack(self, process: Process) -> tuple[Frame, ...]:
        watched = next(w for w in self._look() if w.rank == process.rank)
        return read_main_stack(process.pid, name_stacks(watched.folder, process.rank))


def _describe(processes: Mapping[int, Process]) -> dict[int, tuple[int, bool]]:
    """By rank: its process, and whether that has ended."""
    return {rank: (process.pid, process.state == "ended") for rank, process in processes.items()}


def _read_source(path: str) -> Sequence[str]:
    return linecache.getlines(path)
