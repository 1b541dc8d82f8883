"""Reports a rank's state to the launcher from a thread: a `Beat` every second, a `Report` when asked.

The thread starts before the script's first line, imports nothing of torch by itself, and prints nothing.
Python's `threading` does not know it, so a script that counts or joins its threads does not find it; the
system knows it as `paceline-watch`. It ends with the process, or when the launcher has gone. It pauses around
a fork, and the child closes what it inherited. At the interpreter's end it has left torch's code, because a
thread that is stopped there would crash the process.
"""

from __future__ import annotations

import _thread
import atexit
import faulthandler
import os
import re
import select
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from paceline.launching.ending.endings import Ending, describe_ending, name_signal
from paceline.launching.rank.import_hook import when_imported
from paceline.launching.rank.requests import follow_request
from paceline.launching.watcher import name_account
from paceline.own_code import is_own
from paceline.phrases import join
from paceline.pipeline.under_way import UNDER_WAY
from paceline.torch_seams.profiling import load_annotations
from paceline.torch_seams.watching import count_microbatches, find_world, list_reduced_names
from paceline.watch.protocol.report import (
    WATCHING_THREAD,
    Beat,
    Call,
    Fact,
    Frame,
    Group,
    Phase,
    Report,
    Stack,
)
from paceline.watch.protocol.stacks import SIGNAL
from paceline.watch.protocol.wire import Ask, Unpacker, pack
from paceline.watch.rank.exits import Exits
from paceline.watch.rank.first_not_finite import Gradients
from paceline.watch.rank.meeting import find_meeting, find_microbatches
from paceline.watch.rank.memory_guard import MemoryGuard
from paceline.watch.rank.operations import Operations
from paceline.watch.rank.recorder import CollectiveProgress, CollectiveRecorder, choose_buffer_size
from paceline.watch.rank.sampling import Sampler
from paceline.watch.rank.sentinels.sentinels import Sentinels
from paceline.watch.rank.threads import Mark, mark_main_thread, mark_traceback, read_stacks, resolve

_BEAT_S = 1.0
# A fork waits this long for a report that is being made; an exit waits for the last beat.
_REST_S = 2.0
_LEAVE_S = 0.5
# The start waits this long for the thread; on a full machine it has no core at once.
_NAMED_S = 1.0
_SEND_TIME = struct.pack("@ll", 2, 0)  # a `struct timeval`, in seconds and microseconds
_C10D = "torch.distributed.distributed_c10d"
_UNUSED = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_MANY_NAMES = 8
# Its functions are on the stack of a rank that waits in them.
_C10D_FILE = "torch/distributed/distributed_c10d.py"
# Signals that are meant for the thread in which they occur.
_OWN_FAULTS = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"}


def begin(rank: int, socket_path: str, stacks_path: str) -> WatchedProcess:
    """Start watching this process for the launcher; call it once, before the script's first line.

    Args:
        rank: global.
        socket_path: where the launcher listens; if it does not, nothing is watched.
        stacks_path: the file into which the interpreter writes its stacks upon the signal
            `stacks.SIGNAL`.
    """
    watched = WatchedProcess(rank)
    watched.begin(socket_path, stacks_path)
    return watched


class WatchedProcess:
    """This process, as its launcher watches it.

    Args:
        rank: global.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.operations = Operations()
        self._recorder = CollectiveRecorder(self.operations)
        self._gradients = Gradients()
        self._sentinels = Sentinels(self._gradients, lambda: self.operations.count_transfers().total())
        self._sampler = Sampler(time.monotonic())
        self._guard: MemoryGuard | None = None
        self._has_begun = False
        self._is_leaving = False
        self._is_over = False
        # Held while the thread is in torch's code.
        self._work = threading.Lock()
        # Held while a message is sent: by the watching thread, or by another thread as the last report.
        self._sending = threading.Lock()
        self._has_reported_end = False
        self._had_groups = False
        self._pid = os.getpid()
        self._exits = Exits(rank, self.report_end)
        self._resting = threading.local()
        self._socket: socket.socket | None = None
        self._inode = 0
        self._stacks: IO[str] | None = None
        self._ended = threading.Event()
        self._is_named = threading.Event()

    def begin(self, socket_path: str, stacks_path: str) -> None:
        """Start the thread, if the launcher listens."""
        self._register_stacks(stacks_path)
        self._guard = MemoryGuard(self._rank, name_account(Path(stacks_path).parent, self._rank))
        follow_request(self._rank, Path(socket_path).parent)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(socket_path)
            self._socket = connection
            self._inode = os.fstat(connection.fileno()).st_ino
        except OSError:  # The launcher has gone.
            connection.close()
            return
        with suppress(Exception):  # An unknown version of torch must not keep the script from running.
            when_imported("torch", self._meet_torch)
        os.register_at_fork(
            before=self._rest, after_in_parent=self._resume, after_in_child=self._close_in_child
        )
        atexit.register(self.end)
        self._exits.watch_exit()
        with suppress(OSError):
            # From here, because the script may hold Python's lock before the thread first runs.
            self._send(pack(self._make_beat()))
        _thread.start_new_thread(self._run, ())
        self._is_named.wait(
            _NAMED_S
        )  # the launcher finds the thread by its name, also if Python is locked next

    def end(self) -> None:
        """Make the thread send a last beat and end, and restore torch's methods."""
        if self._is_over or self._socket is None:
            return
        self._sentinels.end()
        self.operations.remove()
        self._gradients.remove()
        if self._guard is not None:
            self._guard.remove()
        self._exits.forget()
        self._is_leaving = True
        if self._is_ours():
            with suppress(OSError):  # This wakes it.
                self._socket.shutdown(socket.SHUT_RD)
        # Not for long: a launcher that does not read must not delay the process.
        self._ended.wait(_LEAVE_S)
        self._rest()  # So that the thread is no longer in torch's code.
        self._is_over = True
        self._resume()
        if self._ended.is_set() and self._is_ours():
            self._socket.close()

    def note_error(self, error: BaseException) -> None:
        """Report the exception that ends the script, and where it was raised."""
        if self._guard is not None:
            self._guard.note_error(error)
        with suppress(Exception):
            _name_unused(error)
        with suppress(Exception):
            if self._gradients.note_error():  # At once, because the launcher ends the remaining ranks.
                self._send(pack(self._make_beat()))
        with suppress(Exception):  # What ends the script is reported elsewhere too.
            ending = replace(describe_ending(self._rank, error), trace="", pickled="")
            self.report_end(ending, resolve(mark_traceback(error.__traceback__)))

    def report_end(self, last: Ending, frames: tuple[Frame, ...]) -> None:
        """Send a last report, from whichever thread ends this process; only the first call does."""
        if self._is_over or self._has_reported_end or self._socket is None or self._pid != os.getpid():
            return
        self._has_reported_end = True
        with suppress(OSError):
            # A launcher that does not read must not delay the process.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIME)
            self._send(pack(self._make_last_report(last, frames)))

    def _register_stacks(self, path: str) -> None:
        if signal.getsignal(SIGNAL) is not signal.SIG_DFL:  # The signal has another use here.
            return
        try:
            self._stacks = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open until the end)
        except OSError:
            return
        faulthandler.register(SIGNAL, file=self._stacks, all_threads=True)

    def _meet_torch(self, torch: object) -> None:
        choose_buffer_size()
        load_annotations(torch)
        self.operations.install(torch)
        self._exits.watch_terminate()
        self._gradients.install(torch)
        self._sentinels.install(torch)
        if self._guard is not None:
            self._guard.install(torch)

    # ---- the thread

    def _run(self) -> None:
        try:
            # The launcher has gone, or the script has closed our descriptor. No error here may reach the
            # user's script.
            with suppress(Exception):
                self._serve()
        finally:
            self._ended.set()

    def _serve(self) -> None:
        with suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(
                WATCHING_THREAD, encoding="ascii"
            )
        self._is_named.set()
        others = {number for number in signal.valid_signals() if name_signal(-number) not in _OWN_FAULTS} - {
            SIGNAL
        }
        signal.pthread_sigmask(signal.SIG_BLOCK, others)
        assert self._socket is not None
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        unpacker = Unpacker()
        next_s = time.monotonic() + _BEAT_S
        while not self._is_leaving:
            now_s = time.monotonic()
            if now_s >= next_s:
                self._send(pack(self._make_beat()))
                # Do not make up for the beats that a stopped process has missed.
                next_s = max(next_s + _BEAT_S, now_s + _BEAT_S / 2)
            if now_s >= self._sampler.next_s:
                self._sample()
            assert self._guard is not None
            if now_s >= self._guard.next_s:
                self._look_at_memory(self._guard)
            until_s = min(next_s, self._sampler.next_s, self._guard.next_s) - time.monotonic()
            if not poll.poll(max(0.0, until_s) * 1000):
                continue
            data = self._socket.recv(4096)
            if not data:
                break
            # A thread that had to wait for Python's lock answers all requests at once.
            asks = [message for message in unpacker.feed(data) if isinstance(message, Ask)]
            if asks:
                self._send(pack(self._make_report(is_full=any(ask.is_full for ask in asks))))
        if self._is_leaving:
            beat = self._make_beat()
            self._send(pack(beat))
            while beat.facts:  # a beat takes some of them only
                beat = self._make_beat()
                self._send(pack(beat))
            report = self._make_closing_report()
            if report.calls:
                self._send(pack(report))

    def _send(self, data: bytes) -> None:
        if not self._sending.acquire(timeout=_REST_S):
            raise OSError("another message does not get through")
        try:
            if not self._is_ours():
                raise OSError("the descriptor is another's now")
            assert self._socket is not None
            self._socket.sendall(data)
        finally:
            self._sending.release()

    def _is_ours(self) -> bool:
        """Return whether our descriptor is still our socket: a script may close all, and the number be
        reused."""
        with suppress(OSError):
            assert self._socket is not None
            return os.fstat(self._socket.fileno()).st_ino == self._inode
        return False

    # ---- the messages

    def _make_beat(self) -> Beat:
        progress = CollectiveProgress({}, {})
        with self._work:
            # Whatever torch has changed: a beat without its numbers is better than none.
            with suppress(Exception):
                self._had_groups |= _has_groups()
                if not self._is_over and self._had_groups:
                    progress = self._recorder.read_progress()
            with suppress(Exception):
                if not self._is_over:
                    self._gradients.settle()
            stack = mark_main_thread()
        facts: tuple[Fact, ...] = ()
        with suppress(Exception):
            facts = self._sentinels.collect()
        pace = None
        with suppress(Exception):  # A script may have unusual file names and sources.
            pace = self._sampler.drain()
        return Beat(
            rank=self._rank,
            time_s=time.time(),
            phase=self._find_phase(stack),
            issued=progress.issued,
            completed=progress.completed,
            place=hash(tuple((id(code), at) for code, at in stack)) & 0xFFFFFFFF,
            is_waiting=any(code.co_filename.endswith(_C10D_FILE) for code, _ in stack),
            not_finite=self._gradients.found,
            pace=pace,
            facts=facts,
        )

    def _sample(self) -> None:
        # Without a group the rank waits for no other; what raises here must not reach the script.
        with self._work, suppress(Exception):
            if _has_groups():
                self._sampler.take(time.monotonic())
            else:
                self._sampler.skip(time.monotonic())

    def _look_at_memory(self, guard: MemoryGuard) -> None:
        with self._work:
            try:
                guard.look()
            except Exception:  # what is being looked at changes meanwhile
                guard.next_s = time.monotonic() + _BEAT_S

    def _make_report(self, *, is_full: bool) -> Report:
        num_named, made_at = 0, dict[str, Frame]()
        with self._work:
            is_known = not self._is_over and _has_groups()
            groups, calls = self._read_calls(is_known, is_full=is_full)
            with suppress(Exception):
                if is_known:
                    num_named, made_at = self._recorder.read_names()
            stacks = read_stacks()
            phase = self._find_phase(mark_main_thread())
            meets, joins_as = find_meeting()
        return Report(
            *(self._rank, time.time(), phase, groups, calls, stacks),
            meets=meets,
            joins_as=joins_as,
            num_microbatches=find_microbatches(),
            num_named=num_named,
            made_at=made_at,
            action="" if UNDER_WAY.action is None else UNDER_WAY.action.words,
            awaited="" if UNDER_WAY.awaited is None else str(UNDER_WAY.awaited),
        )

    def _make_closing_report(self) -> Report:
        """Return a report of all recorded calls, destroyed groups included, for a comparison after a normal
        end."""
        with self._work:
            is_known = not self._is_over and _C10D in sys.modules
            groups, calls = self._read_calls(is_known, is_full=True, has_destroyed=True)
        number = count_microbatches()
        return Report(self._rank, time.time(), "leaving", groups, calls, (), num_microbatches=number)

    def _make_last_report(self, last: Ending, frames: tuple[Frame, ...]) -> Report:
        # With a limit: the thread that holds it may be what ends the process.
        has_lock = self._work.acquire(timeout=_REST_S)
        # Also if the script has destroyed its groups by now.
        groups, calls = self._read_calls(has_lock and _C10D in sys.modules)
        if has_lock:
            self._work.release()
        stacks = (Stack("MainThread", frames),)
        number = count_microbatches()
        return Report(
            self._rank, time.time(), "leaving", groups, calls, stacks, last, num_microbatches=number
        )

    def _read_calls(self, is_known: bool, **which: bool) -> tuple[dict[str, Group], tuple[Call, ...]]:
        """Return the groups and their calls; none if torch has changed what is read."""
        with suppress(Exception):
            if is_known:
                return self._recorder.read_calls(**which)
        return {}, ()

    def _find_phase(self, stack: tuple[Mark, ...]) -> Phase:
        if not threading.main_thread().is_alive():
            return "leaving"
        is_joining = any(
            code.co_name == "init_process_group" and "distributed" in code.co_filename for code, _ in stack
        )
        self._has_begun |= is_joining or _has_groups() or any(is_own(code.co_filename) for code, _ in stack)
        if is_joining:
            return "joining"
        return "running" if self._has_begun else "starting"

    # ---- forks

    def _rest(self) -> None:
        self._resting.is_on = not self._is_over and self._work.acquire(timeout=_REST_S)

    def _resume(self) -> None:
        if self._resting.is_on:  # The thread has paused in time.
            self._work.release()

    def _close_in_child(self) -> None:
        self._is_over = True
        self._exits.forget()
        if self._socket is not None and self._is_ours():
            self._socket.close()


def _name_unused(error: BaseException) -> None:
    """Add the names of the parameters to DDP's error on those without a gradient, which has their indices."""
    found = _UNUSED.search(str(error))
    if found is not None:
        indices = [int(index) for index in found[1].split()]
        models = [names for names in list_reduced_names() if max(indices) < len(names)]
        if len(models) == 1:
            listed = join([f"{index} is {models[0][index]}" for index in indices[:_MANY_NAMES]])
            more = f" and {len(indices) - _MANY_NAMES} more" if len(indices) > _MANY_NAMES else ""
            error.add_note(f"Parameters without a gradient: {listed}{more}.")


def _has_groups() -> bool:
    """Return whether a process group exists; otherwise, asking the Flight Recorder would fix its size."""
    return bool(getattr(find_world(), "pg_map", None))
