"""The launcher's side of `keeper.py`: starts the keeper and the pump, and holds this node's ranks.

`start_keeper` forks, so it comes before any thread, any context and anything of torchelastic. In a forked
rank it does not return: it raises `Become`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.launch.keeper import Ended, Finish, Finished, Keeper, Kill, Refused, Start, Started
from paceline.launch.pump import DRAIN, run_pump
from paceline.launch.script import Become, Place
from paceline.launch.warm import Warmth

COLD = "cold-"
"""Begins the name of a file that a rank leaves which has started over, with the variables that made it."""
_DRY_S = 3.0
_FINISH_S = 30.0
_START_S = 60.0


@dataclass(frozen=True)
class Pump:
    """The pump's process, and the socket to it."""

    pid: int
    channel: socket.socket

    def drain(self) -> None:
        """Waits until what ranks have printed has been passed on, a few seconds at most."""
        with suppress(OSError):
            self.channel.settimeout(_DRY_S)
            self.channel.send(DRAIN)
            self.channel.recv(16)

    def close(self) -> None:
        """Ends the process."""
        self.channel.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def start_pump() -> Pump:
    """Forks the pump; the earlier, the smaller it is."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            ours.close()
            run_pump(its)
        finally:
            os._exit(0)
    its.close()
    return Pump(pid, ours)


def start_keeper(pump: Pump, folder: str, warmth: Warmth | None, load: Sequence[str] = ()) -> Ranks:
    """Forks the keeper from this process.

    Args:
        pump: takes what ranks print.
        folder: the launcher's folder, which the keeper removes where the launcher can't.
        warmth: what this process has imported for the ranks; None where all of them start cold.
        load: what the keeper shall import besides, while the launcher does other things.

    Raises:
        Become: in each rank that is forked from the keeper.
    """
    ours, its = Pipe()
    pid = os.fork()
    if pid:
        its.close()
        return Ranks(pid, ours, pump)
    try:
        ours.close()
        if warmth is not None:
            warmth.load(load)
            warmth.freeze()
        start = Keeper(its, pump.channel, folder).serve()
    except BaseException:
        # Nobody above may take this process for the launcher.
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    assert start.script is not None
    place = Place(start.rank, start.folder, start.log)
    raise Become(start.script, place, partial(_prepare, start, warmth))


def _prepare(start: Start, warmth: Warmth | None) -> None:
    if warmth is not None:
        warmth.hide(partial(_start_over, start))


def _start_over(start: Start, variables: list[str]) -> None:
    """Executes the script again in a fresh Python, because it has set variables that came too late."""
    from paceline.errors import PacelineError

    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if threading.active_count() > 1 or (children.is_file() and children.read_text().strip()):
        raise PacelineError(
            "PL341",
            saw=f"The script set {', '.join(variables)} before it imported torch, with threads or processes "
            "of its own running.",
            rule="The warm start has imported torch already, which reads them then; and such a script "
            "can't be started over without harm.",
            fix="Start it with paceline run --cold, or set the variables before paceline run.",
        )
    with suppress(OSError):
        (Path(start.folder) / f"{COLD}{start.rank}").write_text(" ".join(variables), encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    assert start.script is not None
    os.execve(sys.executable, [sys.executable, "-u", *start.script.words], start.environ)


class RankProcess:
    """One started rank; has what torchelastic asks of a `subprocess.Popen`."""

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
        """The exit code, or the signal's number below zero; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.start.command, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def await_start(self) -> None:
        """Raises OSError where it could not be started."""
        if not self._answered.wait(_START_S):
            raise OSError("the process that starts ranks does not answer")
        if self.refusal:
            raise OSError(self.refusal)

    def note_started(self, pid: int, refusal: str = "") -> None:
        self.pid, self.refusal = pid, refusal
        self._answered.set()

    def note_ended(self, status: int, time_s: float | None) -> None:
        self.returncode, self.ended_s = status, time_s
        self._ended.set()

    def send(self, number: int) -> None:
        """Sends a signal to its process group, as torchrun does; the same one once only."""
        if self.returncode is None and self.pid and number not in self.asked:
            self.asked.add(number)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)


class Ranks:
    """This node's ranks, by way of the keeper.

    Attributes:
        keeper_died: whether the keeper ended before it was told to.
    """

    def __init__(self, keeper_pid: int, connection: Connection, pump: Pump) -> None:
        self.keeper_pid = keeper_pid
        self.pump = pump
        self.keeper_died = False
        self._connection = connection
        self._lock = threading.Lock()
        self._started: list[RankProcess] = []
        self._finished = threading.Event()
        self._reader: threading.Thread | None = None

    @property
    def running(self) -> list[RankProcess]:
        """Those that have not ended."""
        return [rank for rank in self._started if rank.returncode is None]

    @property
    def latest(self) -> list[RankProcess]:
        """The newest process of each local rank."""
        return list({rank.start.local_rank: rank for rank in self._started}.values())

    def start(self, start: Start) -> RankProcess:
        """Starts a rank.

        Raises:
            OSError: it could not be.
        """
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, name="paceline-ranks", daemon=True)
            self._reader.start()
        rank = RankProcess(start)
        self._started.append(rank)
        self._tell(start)
        rank.await_start()
        return rank

    def send(self, number: int) -> None:
        """Sends a signal to all running ranks."""
        for rank in self.running:
            rank.send(number)

    def kill(self, rank: RankProcess) -> None:
        """Ends a rank and all that it has started, now."""
        if rank.returncode is None:
            rank.asked.add(signal.SIGKILL)
            self._tell(Kill(rank.pid))

    def finish(self, *, kills: bool) -> None:
        """Ends the keeper and the pump; with `kills` also everything that ranks have left behind."""
        self.pump.drain()
        self._tell(Finish(kills))
        if self._reader is not None and not self._finished.wait(_FINISH_S) and not self.keeper_died:
            os.kill(self.keeper_pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.keeper_pid, 0)
        self.pump.close()

    def _tell(self, message: Any) -> None:
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
                        rank.note_ended(message.status, message.time_s)
            elif isinstance(message, Finished):
                self._finished.set()
                return

    def _lose_keeper(self) -> None:
        self.keeper_died = not self._finished.is_set()
        for rank in self.running:  # the kernel has killed them with their parent
            rank.note_ended(-signal.SIGKILL, None)
            rank.note_started(rank.pid, "" if rank.pid else "the process that starts ranks has died")
        self._finished.set()


class Rounds:
    """What the agent tells the launcher, and the launcher the agent.

    Attributes:
        asked: the signal that ends the job, once there is one.
        number: how often ranks were started, less one.
        on_restart: called with the restarts that are left, when the ranks of a round have been stopped.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self.number = -1
        self.on_restart: Callable[[int], None] = lambda remaining: None

    def begin(self) -> None:
        """The agent is about to start ranks."""
        self.number += 1


class RankHandler:
    """Takes the place of torchelastic's `SubprocessHandler`: a rank comes from the keeper, not from Popen."""

    def __init__(self, ranks: Ranks, build: Callable[..., Start], **wishes: Any) -> None:
        self._ranks = ranks
        self.local_rank_id: int = wishes["local_rank_id"]
        self.proc = ranks.start(build(**wishes))

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Asks the rank to end; SIGKILL ends all that it has started too."""
        if death_sig == signal.SIGKILL:
            self._ranks.kill(self.proc)
        else:
            self.proc.send(death_sig or signal.SIGTERM)
