"""The process that ranks are started from: it forks them, reaps them, and ends what they leave.

It is itself a fork of the launcher, made after torch was imported there and before anything else started
(no threads, no CUDA), and does nothing but wait. For a rank it forks; the rank unwinds to the command line
and becomes the script (`script.py`), or executes a program: one that starts cold, a Python (`cold.py`).

`keeper_messages.py` has what the launcher and the keeper send each other. If the launcher is gone, the
connection ends: ranks get SIGTERM, ten seconds, then SIGKILL. (If the keeper is killed, the kernel kills its
ranks: PR_SET_PDEATHSIG.)

The keeper adopts processes that ranks leave behind (PR_SET_CHILD_SUBREAPER), so that even a process that has
left its group and its parent is found; where the keeper is killed, `paceline run` itself does so.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

from paceline.launching.processes.family import (
    adopt_orphans,
    die_with_parent,
    end_descendants,
    end_family,
    send_to_group,
    wait,
)
from paceline.launching.processes.folder import remove_folder
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
from paceline.launching.rank.call import RankCall, run_call
from paceline.launching.rank.own_meeting import allow_own_meeting
from paceline.launching.rank.sockets import keep_sockets_in
from paceline.launching.warm.warm import Warmth
from paceline.launching.watcher import load_watch, preload_watch

# How long ranks may take to save and leave after the launcher has gone.
_GRACE_S = 10.0


class Keeper:
    """The keeper's loop. `serve` returns only in a forked rank, with the message that it starts from."""

    def __init__(self, connection: Connection, pump: Pump | None = None) -> None:
        self._connection = connection
        # Held only so that the pump sees that a process is left.
        self._pump = pump
        self._folder = ""
        self._ranks: set[int] = set()
        self._pid = os.getpid()
        self._inputs = selectors.DefaultSelector()
        self._wake: tuple[int, int] = (-1, -1)
        self._until_s = float("inf")

    def serve(self) -> Start:
        """Work until the launcher has finished or ended."""
        adopt_orphans()
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # a parent may have blocked it
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        self._inputs.register(self._connection, selectors.EVENT_READ)
        self._inputs.register(self._wake[0], selectors.EVENT_READ)
        while True:
            self._inputs.select(self._end_late_ranks())
            with suppress(BlockingIOError):
                os.read(self._wake[0], 4096)
            self._reap()
            while self._connection.poll():
                start = self._listen()
                if start is not None:
                    return start

    def _listen(self) -> Start | None:
        """Process one message; return its message in a forked rank, `None` in the keeper."""
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._outlive_launcher()
        if isinstance(message, Start):
            targets = (recv_handle(self._connection), recv_handle(self._connection))
            return self._start(message, targets)
        if isinstance(message, LetRun):
            self._until_s = message.until_s
        elif isinstance(message, Kill):
            end_family(message.pid)
        elif isinstance(message, Sweep):
            self._folder = ""
            if message.kills:
                end_descendants(self._reap)
            self._send(Swept())
            if message.leaves:
                os._exit(0)
        return None

    def _end_late_ranks(self) -> float | None:
        """End ranks that may not run any longer, and return the seconds until the others may not."""
        left_s = self._until_s - time.monotonic()
        if left_s > 0 or not self._ranks:
            return left_s if self._ranks and left_s < float("inf") else None
        for pid in list(self._ranks):
            end_family(pid)
        self._until_s = float("inf")
        return None

    # ---- starting

    def _start(self, start: Start, targets: tuple[int, int]) -> Start | None:
        self._folder = start.launch_folder
        if isinstance(start.entry, RankCall):  # a script's rank hides modules that it has not asked for
            preload_watch(start.watch)
        failed_read, failed_write = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            os.close(failed_read)
            self._enter_rank(start, targets, failed_write)
            return start
        for fd in (failed_write, *targets):
            os.close(fd)
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
        """Set up the new process like a child of torchrun."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        die_with_parent()
        if os.getppid() != self._pid:  # it died before we could ask
            os._exit(1)
        for fd, target in enumerate(targets, start=1):
            os.dup2(target, fd)
        self._inputs.close()
        self._connection.close()
        if self._pump is not None:
            self._pump.let_go()
        for fd in (*targets, *self._wake):
            os.close(fd)
        os.environ.clear()
        os.environ.update(start.environ)
        keep_sockets_in(start.launch_folder)
        allow_own_meeting()
        if start.entry is None:
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

    def _send(self, message: Started | Refused | Ended | Swept) -> None:
        with suppress(OSError):  # the launcher has gone: the next read of the connection reports it
            self._connection.send(message)

    def _outlive_launcher(self) -> None:
        for pid in self._ranks:
            send_to_group(pid, signal.SIGTERM)
        wait(lambda: not self._ranks, _GRACE_S, self._reap)
        end_descendants(self._reap)
        if self._folder:
            remove_folder(Path(self._folder))
        os._exit(1)


# ---- a keeper in a process of its own, for functions


def leave_terminal() -> None:
    """Make this process ignore signals that a terminal or `timeout` sends to the launcher's group."""
    with suppress(PermissionError):  # it leads a session already
        os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Run as `python -c ... CONNECTION`: import what ranks need, and serve one launcher's calls."""
    leave_terminal()
    connection = Connection(int(sys.argv[1]))
    warmth = Warmth()
    warmth.load(_FOR_CALLS)
    serve_calls(connection)


def serve_calls(connection: Connection, call: RankCall | None = None) -> None:
    """Serve until the launcher has ended; in a rank, call the function. Does not return.

    Args:
        call: what ranks run, if it cannot be sent because it cannot be pickled.
    """
    start = Keeper(connection).serve()
    entry = call or start.entry
    assert isinstance(entry, RankCall)
    note_error = load_watch(start.watch, start.rank, start.launch_folder, start.folder)()
    run_call(entry, start.rank, Path(start.folder), start.log, note_error)


_FOR_CALLS = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "paceline.world")
