"""The launcher's side of `keeper.py`: starts the keeper, and holds this node's ranks.

`fork_keeper` forks, so it comes before any thread, any context and anything of torchelastic. In a forked
rank it does not return: it raises `Become`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from paceline.launching.processes.family import adopt_orphans, end_descendants, send_to_group
from paceline.launching.processes.keeper import Keeper, leave_terminal, serve_calls
from paceline.launching.processes.keeper_messages import (
    Ended,
    Kill,
    LetRun,
    Refused,
    Start,
    Started,
    Sweep,
    Swept,
)
from paceline.launching.processes.streams import Pump
from paceline.launching.rank.call import RankCall
from paceline.launching.rank.cold import let_in
from paceline.launching.rank.script import Become, EndReportPath, Script
from paceline.launching.warm.warm import Warmth
from paceline.launching.watcher import NoteError, WatchedRank, load_watch

COLD = "cold-"
"""Prefix of the file that a rank leaves when it starts over; it lists the variables that caused this."""
_SWEEP_S = 30.0
_START_S = 60.0


def fork_keeper(pump: Pump, warmth: Warmth | None, load: Sequence[str] = ()) -> Ranks:
    """Fork the keeper from this process, for scripts.

    Args:
        pump: the one that ranks print through.
        warmth: the packages that this process has imported for the ranks; None if all ranks start cold.
        load: further modules for the keeper to import, while the launcher does other things.

    Raises:
        Become: in each rank that is forked from the keeper.
    """
    ours, its = Pipe()
    pid = _fork()
    if pid:
        its.close()
        adopt_orphans()
        return Ranks(pid, ours, ends_orphans_except={pump.pid})
    try:
        leave_terminal()
        ours.close()
        if warmth is not None:
            warmth.load(load)
        start = Keeper(its, pump).serve()
    except BaseException:
        # No caller may mistake this process for the launcher.
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    assert isinstance(start.entry, Script)
    place = EndReportPath(start.rank, start.folder, start.log)
    raise Become(start.entry, place, partial(_prepare, start, warmth))


def spawn_keeper() -> Ranks:
    """Start a keeper for functions in a new process, which imports torch in the background."""
    ours, its = Pipe()
    code = (
        "import sys; sys.path[:] = eval(sys.argv.pop()); "
        "from paceline.launching.processes.keeper import main; main()"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-c", code, str(its.fileno()), repr(sys.path)]
    with its:
        process = subprocess.Popen(command, pass_fds=[its.fileno()], start_new_session=True)
    return Ranks(process.pid, ours, process)


def fork_keeper_for_call(call: RankCall) -> Ranks:
    """Fork a keeper whose ranks have this process's state, for example a notebook's functions."""
    ours, its = Pipe()
    pid = _fork()
    if pid:
        its.close()
        return Ranks(pid, ours)
    try:
        leave_terminal()
        ours.close()
        serve_calls(its, call)
    finally:
        os._exit(1)


def _fork() -> int:
    """Fork with stop signals blocked: an exception that a handler raises in a function that Python calls
    around a fork would only be printed."""
    stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        return os.fork()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare(start: Start, warmth: Warmth | None) -> NoteError:
    begin_watch = load_watch(start.watch, start.rank, start.launch_folder, start.folder)
    if warmth is not None:
        warmth.hide(partial(_start_over, start))
    return begin_watch()


def _start_over(start: Start, variables: list[str]) -> None:
    """Execute the script again in a fresh Python, because it has set variables that came too late."""
    from paceline.errors import PacelineError

    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if threading.active_count() > 1 or (children.is_file() and children.read_text().strip()):
        raise PacelineError(
            "PL341",
            saw=f"The script set {', '.join(variables)} before it imported torch, with threads or processes "
            "of its own running.",
            rule="The warm start has already imported torch, which reads them during import, and restarting "
            "such a script could do harm.",
            fix="Start it with paceline run --cold, or set the variables before paceline run.",
        )
    with suppress(OSError):
        (Path(start.folder) / f"{COLD}{start.rank}").write_text(" ".join(variables), encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    assert isinstance(start.entry, Script)
    command = sys.executable, "-u", *start.entry.words
    if start.watch:
        command = let_in(command, start.watch, start.rank, start.launch_folder, start.folder)
    os.execve(sys.executable, command, start.environ)


def ignore_failure(rank: int, status: int) -> None:
    """Ignore a rank's failure, because there is no watcher."""


class RankProcess:
    """One started rank, with the interface of a `subprocess.Popen` that torchelastic uses."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.pid = 0
        self.returncode: int | None = None
        self.ended_s: float | None = None
        self.asked: set[int] = set()
        self._answered = threading.Event()
        self._ended = threading.Event()
        self.refusal = ""

    def poll(self) -> int | None:
        """Return the exit code, or the negative number of the signal; None while the rank runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.start.command, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def await_start(self) -> None:
        """Raise OSError if it could not be started."""
        if not self._answered.wait(_START_S):
            raise OSError("the process that starts the ranks does not answer")
        if self.refusal:
            raise OSError(self.refusal)

    def note_started(self, pid: int, refusal: str = "") -> None:
        self.pid, self.refusal = pid, refusal
        self._answered.set()

    def note_ended(self, status: int, time_s: float | None) -> None:
        self.returncode, self.ended_s = status, time_s
        self._ended.set()

    def send(self, number: int) -> None:
        """Send a signal to its process group, as torchrun does; the same one once only."""
        if self.returncode is None and self.pid and number not in self.asked:
            self.asked.add(number)
            send_to_group(self.pid, number)


class Ranks:
    """This node's ranks, started through the keeper.

    Attributes:
        keeper_died: whether the keeper ended without being asked to.
        on_failure: called with its number and exit code when a rank has failed by itself, before the agent
            hears of it and ends the others.
    """

    def __init__(
        self,
        keeper_pid: int,
        connection: Connection,
        process: subprocess.Popen[bytes] | None = None,
        ends_orphans_except: set[int] | None = None,
    ) -> None:
        self.keeper_pid = keeper_pid
        self.keeper_died = False
        self.on_failure: Callable[[int, int], None] = ignore_failure
        self._connection = connection
        self._process = process
        self._spared = ends_orphans_except
        self._has_answered = False
        self._lock = threading.Lock()
        self._started: list[RankProcess] = []
        self._swept = threading.Event()
        self._reader = threading.Thread(target=self._read, name="paceline-ranks", daemon=True)

    @property
    def running(self) -> list[RankProcess]:
        """The ranks that have not ended."""
        return [rank for rank in self._started if rank.returncode is None]

    @property
    def latest(self) -> list[RankProcess]:
        """The newest process of each local rank."""
        return list({rank.start.local_rank: rank for rank in self._started}.values())

    def list_watched(self) -> list[WatchedRank]:
        """Return the newest process of each local rank, for a watcher."""
        return [
            WatchedRank(
                rank.start.rank,
                int(rank.start.environ.get("WORLD_SIZE", "1")),
                Path(rank.start.folder),
                rank.pid,
                rank.returncode,
            )
            for rank in self.latest
        ]

    def start(self, start: Start, streams: tuple[int, int]) -> RankProcess:
        """Start a rank with these descriptors as stdout and stderr, which it closes here.

        Raises:
            OSError: it could not be started.
        """
        if self._reader.ident is None:
            self._reader.start()
        rank = RankProcess(start)
        self._started.append(rank)
        try:
            with self._lock, suppress(OSError):  # the reader notices that the keeper has gone
                self._connection.send(start)
                for fd in streams:
                    send_handle(self._connection, fd, self.keeper_pid)
        finally:
            for fd in streams:
                os.close(fd)
        rank.await_start()
        return rank

    def send(self, number: int) -> None:
        """Send a signal to all running ranks."""
        for rank in self.running:
            rank.send(number)

    def kill(self, rank: RankProcess) -> None:
        """End a rank and all processes that it has started, now."""
        if rank.returncode is None:
            rank.asked.add(signal.SIGKILL)
            self._send(Kill(rank.pid))

    def hold(self, until_s: float) -> None:
        """Let ranks run until some time of the monotonic clock; the keeper ends them, also without us."""
        self._send(LetRun(until_s))

    def sweep(self, *, kills: bool) -> None:
        """End the job; with `kills`, also everything that ranks have left behind."""
        self._ask(Sweep(kills, leaves=False))
        self._started.clear()

    def finish(self, *, kills: bool) -> None:
        """End the job and the keeper."""
        self._ask(Sweep(kills, leaves=True))
        with suppress(ChildProcessError):
            if self._process is not None:
                self._process.wait()
            else:
                os.waitpid(self.keeper_pid, 0)
        # A keeper that has answered has ended in order; what ranks have forked may outlive a good end.
        if self.keeper_died and not self._has_answered and self._spared is not None:
            # The processes that it had adopted, and its ranks' children, are now this process's own.
            end_descendants(lambda: None, self._spared)
        self._connection.close()

    def abandon(self) -> None:
        """End a keeper that has started no rank, and perhaps still imports torch."""
        if not self._started:
            with suppress(ProcessLookupError):
                os.kill(self.keeper_pid, signal.SIGKILL)

    def _ask(self, sweep: Sweep) -> None:
        if self._reader.ident is None:
            self._reader.start()
        self._has_answered = False
        self._swept.clear()
        self._send(sweep)
        if not self.keeper_died and not self._swept.wait(_SWEEP_S):
            os.kill(self.keeper_pid, signal.SIGKILL)

    def _send(self, message: LetRun | Kill | Sweep) -> None:
        with self._lock, suppress(OSError):  # the reader notices that the keeper has gone
            self._connection.send(message)

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                self._lose_keeper()
                return
            if isinstance(message, Started | Refused):
                rank = next(r for r in reversed(self._started) if r.start.local_rank == message.local_rank)
                if isinstance(message, Started):
                    rank.note_started(message.pid)
                else:
                    rank.note_ended(127, None)
                    rank.note_started(0, message.reason)
            elif isinstance(message, Ended):
                for rank in self._started:
                    if rank.pid == message.pid and rank.returncode is None:
                        if message.status != 0 and not rank.asked:
                            self.on_failure(rank.start.rank, message.status)
                        rank.note_ended(message.status, message.time_s)
            elif isinstance(message, Swept):
                self._has_answered = True
                self._swept.set()

    def _lose_keeper(self) -> None:
        self.keeper_died = True
        for rank in self.running:  # the kernel has killed them with their parent
            rank.note_ended(-signal.SIGKILL, None)
            rank.note_started(rank.pid, "" if rank.pid else "the process that starts ranks has died")
        self._swept.set()


class Attempts:
    """The messages between the agent and the launcher.

    Attributes:
        asked: the signal that ends the job, once there is one.
        number: how often ranks were started, less one.
        on_start: called before ranks start, with this node's number, the number of nodes, host and port of
            the store where the ranks meet, and `number`.
        on_loss: called when the round is over because of another node.
        on_restart: called when the ranks of a round have been stopped, with the restarts that are left, and
            with the reason if the nodes have changed.
        find_missing_files: returns the error of ranks that need files of other nodes, if they failed of that.
        may_be_consequence: returns whether all failures of ranks may have their cause on another node.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self.number = -1
        self.on_start: Callable[[int, int, str, int, int], None] = lambda *_: None
        self.on_loss: Callable[[], None] = lambda: None
        self.on_restart: Callable[[int, str | None], None] = lambda remaining, news: None
        self.find_missing_files: Callable[[], Exception | None] = lambda: None
        self.may_be_consequence: Callable[[], bool] = lambda: True

    def ask(self, number: int) -> None:
        """Note the signal that ends the job."""
        self.asked = number

    def begin(self) -> None:
        """Begin a round: the agent is about to start ranks."""
        self.number += 1


class RankHandler:
    """The replacement of torchelastic's `SubprocessHandler`: ranks come from the keeper, not from Popen."""

    def __init__(
        self,
        ranks: Ranks,
        build: Callable[..., tuple[Start, tuple[int, int]]],
        may_be_stuck_s: Callable[[], float | None] = lambda: None,
        **wishes: Any,
    ) -> None:
        self._ranks = ranks
        self._may_be_stuck_s = may_be_stuck_s
        self.local_rank_id: int = wishes["local_rank_id"]
        self.proc = ranks.start(*build(**wishes))

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Ask the rank to end; SIGKILL ends all that it has started too."""
        if death_sig == signal.SIGKILL:
            self._ranks.kill(self.proc)
            return
        self.proc.send(death_sig or signal.SIGTERM)
        stuck_s = self._may_be_stuck_s()
        if stuck_s is not None:
            timer = threading.Timer(stuck_s, self._ranks.kill, [self.proc])
            timer.daemon = True
            timer.start()
