"""The process that ranks are started from: it forks them, reaps them, and leaves nobody behind.

It is itself a fork of the launcher, made after torch was imported there and before anything else started
(no threads, no CUDA), and does nothing but wait. For a rank it forks; the rank unwinds to the command line
and becomes the script (`script.py`), or executes a program where it starts cold.

Protocol, on one `multiprocessing` connection:

- the launcher sends `Start`, `Kill` (a rank and its descendants) or `Finish`; the keeper answers each `Start`
  with `Started` or `Refused`, tells `Ended` for each rank that it reaps, and `Finished` before it leaves;
- where the launcher has gone, the connection ends: ranks get SIGTERM, ten seconds, then SIGKILL.
  (A rank whose keeper is killed is killed by the kernel: PR_SET_PDEATHSIG.)

The keeper adopts what ranks leave behind (PR_SET_CHILD_SUBREAPER), so that even a process which has left its
group and its parent is found. multiprocessing's resource tracker and torch's shared-memory manager may go by
themselves: they remove the segments and semaphores of those who were killed.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import shutil
import signal
import socket
import sys
import termios
import time
import tty
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import psutil

from paceline.launch.pump import send_stream
from paceline.launch.script import Script

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# How long ranks may take to save and leave after the launcher has gone.
_GRACE_S = 10.0
# How long the processes that clear up after the killed ones may take.
_CLEARING_S = 3.0
_CLEARERS = ("multiprocessing.resource_tracker", "torch_shm_manager")


@dataclass(frozen=True)
class Start:
    """A rank that the launcher wants.

    Attributes:
        local_rank: its number on this node.
        rank: its number among all.
        environ: its whole environment.
        command: the program to execute, for a cold start.
        script: what a forked rank becomes; None for a cold start.
        stdout: the file for its output, cut to nothing first; empty for the terminal.
        stderr: the same for its errors.
        log: the file that gets both, whatever they do.
        folder: where it leaves word of its end.
        is_shown: whether output that has no file of its own goes to the terminal.
    """

    local_rank: int
    rank: int
    environ: dict[str, str]
    command: tuple[str, ...]
    script: Script | None
    stdout: str
    stderr: str
    log: str
    folder: str
    is_shown: bool = True


@dataclass(frozen=True)
class Kill:
    """Ends a rank and all of its descendants now."""

    pid: int


@dataclass(frozen=True)
class Finish:
    """Ends the keeper; `kills` says whether processes that ranks have left behind end with it."""

    kills: bool


@dataclass(frozen=True)
class Started:
    """A rank runs."""

    local_rank: int
    pid: int


@dataclass(frozen=True)
class Refused:
    """A rank could not be started."""

    local_rank: int
    reason: str


@dataclass(frozen=True)
class Ended:
    """A rank has ended, by an exit code or a signal's number below zero, at a time in seconds since 1970."""

    pid: int
    status: int
    time_s: float


@dataclass(frozen=True)
class Finished:
    """The keeper leaves; it had to end so many processes."""

    num_killed: int


class Keeper:
    """The loop of the process. `serve` returns in a forked rank only, with what it is to become."""

    def __init__(self, connection: Connection, pump: socket.socket, folder: str) -> None:
        self._connection = connection
        self._pump = pump
        self._folder = folder
        self._ranks: set[int] = set()
        self._pid = os.getpid()
        self._inputs = selectors.DefaultSelector()
        self._wake: tuple[int, int] = (-1, -1)

    def serve(self) -> Start:
        """Works until the launcher has finished or gone."""
        with suppress(PermissionError):
            os.setsid()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        self._inputs.register(self._connection, selectors.EVENT_READ)
        self._inputs.register(self._wake[0], selectors.EVENT_READ)
        while True:
            self._inputs.select()
            with suppress(BlockingIOError):
                os.read(self._wake[0], 4096)
            self._reap()
            while self._connection.poll():
                start = self._listen()
                if start is not None:
                    return start

    def _listen(self) -> Start | None:
        """Does what one message asks for; gives something in a forked rank only."""
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._outlive_launcher()
        if isinstance(message, Start):
            return self._start(message)
        if isinstance(message, Kill):
            self._end_family(message.pid)
        elif isinstance(message, Finish):
            num_killed = self._end_all() if message.kills else 0
            self._send(Finished(num_killed))
            os._exit(0)
        return None

    # ---- starting

    def _start(self, start: Start) -> Start | None:
        try:
            targets, sources = _open_streams(start)
        except OSError as error:
            self._send(
                Refused(start.local_rank, f"{error.filename or 'a pseudo-terminal'}: {error.strerror}")
            )
            return None
        failed_read, failed_write = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            os.close(failed_read)
            for source, _ in sources:
                os.close(source)
            self._enter_rank(start, targets, failed_write)
            return start
        os.close(failed_write)
        for fd in set(targets):
            os.close(fd)
        for source, to in sources:
            with suppress(OSError):  # the pump was killed: the rank will notice
                send_stream(self._pump, source, start.log, to)
            os.close(source)
        with open(failed_read, "rb") as failed:
            reason = failed.read()
        if reason:
            os.waitpid(pid, 0)
            self._send(Refused(start.local_rank, reason.decode()))
        else:
            self._ranks.add(pid)
            self._send(Started(start.local_rank, pid))
        return None

    def _enter_rank(self, start: Start, targets: tuple[int, int], failed: int) -> None:
        """In the new process: takes its place, as a child of torchrun would have it."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:  # it died before we could ask
            os._exit(1)
        for fd, target in enumerate(targets, start=1):
            os.dup2(target, fd)
        for fd in set(targets):
            os.close(fd)
        self._inputs.close()
        self._connection.close()
        self._pump.close()
        for fd in self._wake:
            os.close(fd)
        os.environ.clear()
        os.environ.update(start.environ)
        if start.script is None:
            try:
                os.execvpe(start.command[0], start.command, start.environ)
            except OSError as error:
                os.write(failed, f"{start.command[0]}: {error.strerror}".encode())
                os._exit(127)
        os.close(failed)

    # ---- ending

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._ranks:
                    self._ranks.discard(pid)
                    self._send(Ended(pid, os.waitstatus_to_exitcode(status), time.time()))

    def _send(self, message: Started | Refused | Ended | Finished) -> None:
        with suppress(OSError):  # nobody reads: the next look at the connection says so
            self._connection.send(message)

    def _outlive_launcher(self) -> None:
        for pid in self._ranks:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)
        self._wait(lambda: not self._ranks, _GRACE_S)
        self._end_all()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)

    def _end_family(self, pid: int) -> None:
        """Kills a rank with its descendants, those first that clear up nothing."""
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(pid)
            _kill([*family.children(recursive=True), family])

    def _end_all(self) -> int:
        """Ends all descendants of this process; gives how many had to be killed."""
        me = psutil.Process()
        num_killed = 0
        for _ in range(10):  # a process may be starting another just now
            living = _kill(me.children(recursive=True))
            num_killed += living
            self._wait(lambda: not _list_killable(me), 0.5)
            if not living:
                break
        self._wait(lambda: not me.children(), _CLEARING_S)
        for process in me.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._wait(lambda: not me.children(), 0.5)
        return num_killed

    def _wait(self, is_done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        self._reap()
        while not is_done() and time.monotonic() < end:
            time.sleep(0.02)
            self._reap()


def _kill(processes: list[psutil.Process]) -> int:
    num_killed = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if not _clears_up(process) and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                num_killed += 1
    return num_killed


def _list_killable(me: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in me.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and not _clears_up(process):
                found.append(process)
    return found


def _clears_up(process: psutil.Process) -> bool:
    words = " ".join(process.cmdline())
    return any(name in words for name in _CLEARERS)


# ---- streams


def _open_streams(start: Start) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Where stdout and stderr go, and what the pump reads: pairs of a descriptor and the terminal's or 0."""
    targets: list[int] = []
    sources: list[tuple[int, int]] = []
    try:
        for fd, path in ((1, start.stdout), (2, start.stderr)):
            if path and path != os.devnull:
                targets.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))
                continue
            to = fd if start.is_shown and not path else 0
            source, target = _pipe_like(to)
            targets.append(target)
            sources.append((source, to))
    except OSError:
        for opened in (*targets, *(source for source, _ in sources)):
            os.close(opened)
        raise
    return (targets[0], targets[1]), sources


def _pipe_like(target: int) -> tuple[int, int]:
    """A pipe to what shall reach `target`, or a pseudo-terminal of its size where that is a terminal."""
    if not target or not os.isatty(target):
        return os.pipe()
    source, end = os.openpty()
    tty.setraw(end)  # the real terminal does the translating
    termios.tcsetwinsize(end, termios.tcgetwinsize(target))
    return source, end


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
