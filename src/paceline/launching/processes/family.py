"""Ends processes with all that they have started, except those that clear up and then end by themselves.

multiprocessing's resource tracker and torch's shared-memory manager remove the semaphores and segments of
killed processes, and then exit. They are killed last, if they have not exited by then.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLEARERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
# These reach a tracker without ending it.
_HARMLESS = (signal.SIGINT, signal.SIGTERM)
# How long the processes that clear up may take.
_CLEARING_S = 3.0


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def send_to_group(group: int, number: int) -> None:
    """Send a signal to a process group, as torchrun does, except to processes that clear up."""
    with suppress(ProcessLookupError):
        if number in _HARMLESS:
            os.killpg(group, number)
            return
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and not _clears_up(process):
                process.send_signal(number)


def end_family(pid: int) -> None:
    """Kill a process with its descendants, except those that clear up."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        _kill([*process.children(recursive=True), process])


def end_descendants(reap: Callable[[], None], spared: Collection[int] = ()) -> int:
    """End all descendants of this process; return the number that had to be killed.

    Args:
        reap: takes the exit codes of children that have ended.
        spared: process ids that are left alone.
    """
    me = psutil.Process()

    def living() -> list[psutil.Process]:
        return [
            process
            for process in me.children(recursive=True)
            if process.pid not in spared and _is_alive(process)
        ]

    num_killed = 0
    for _ in range(10):  # a process may be starting another just now
        killed = _kill(living())
        num_killed += killed
        if not killed:
            break
        wait(lambda: not [p for p in living() if not _clears_up(p)], 0.5, reap)

    wait(lambda: not living(), _CLEARING_S, reap)
    for process in living():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    wait(lambda: not living(), 0.5, reap)
    return num_killed


def wait(is_done: Callable[[], bool], seconds: float, reap: Callable[[], None]) -> None:
    """Wait until a condition is true, for a limited time."""
    end = time.monotonic() + seconds
    reap()
    while not is_done() and time.monotonic() < end:
        time.sleep(0.02)
        reap()


def _kill(processes: list[psutil.Process]) -> int:
    num_killed = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if _is_alive(process) and not _clears_up(process):
                process.kill()
                num_killed += 1
    return num_killed


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _clears_up(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has ended
        return any(name in " ".join(process.cmdline()) for name in _CLEARERS)
    return False


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
