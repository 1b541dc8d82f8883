"""Schedules gloo's threads, and waits until they need Python's lock no more; nothing of torch is imported.

gloo's event loop polls a connection again and again while another thread of the process holds its lock
(https://github.com/pytorch/gloo/issues/246). If a message wakes the loop on the core of the thread that is
just sending, the loop takes the core and polls for a whole slice of the scheduler, 3 to 5 ms, before the
thread that holds the lock can go on. As batch work, the loop does not take a core from a running thread.

A thread that runs collectives releases their tensors after it has woken those who wait for the result. If
Python has one of these tensors too, or autograd's context, the thread needs Python's lock for that. A script
that meanwhile destroys the group and drops its DDP model waits for the thread while it holds the lock: the
destructor of DDP's reducer joins the group's threads. The process then sleeps forever (torch 2.11 to 2.13).
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LOOP_NAME = "gloo_tcp_loop"
_LEAST_S = 0.01
_MOST_S = 10.0
_TASKS = Path("/proc/self/task")
_SWITCHES = "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"

_Look = tuple[str, ...]


def schedule_loops_as_batch() -> int:
    """Let gloo's event loops take no core from a running thread; return their number.

    Call it once gloo has connected: each loop has named itself by then, and later groups of the process use
    the same loops. A process alone connects to nobody, so its loop may not be found; it has nothing to send.
    Older versions of torch give the loop no name, so it is not found there (2.11 does not, 2.13 does).
    """
    found = 0
    for task in _list_threads(_LOOP_NAME):
        with suppress(OSError):  # it has just ended, or a container forbids the call
            os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
            found += 1
    return found


def await_gloo_threads(most_s: float = _MOST_S) -> bool:
    """Return once no thread of gloo runs or waits for Python's lock; whether that is so.

    A thread that waits for the lock wakes once per switch interval to ask for it. So a thread that sleeps and
    has not woken for longer than that waits for a collective.

    Args:
        most_s: the longest time to wait, in seconds.
    """
    pause_s = max(_LEAST_S, 2 * sys.getswitchinterval())
    until = time.monotonic() + most_s
    before: dict[str, _Look] | None = None
    while True:
        time.sleep(pause_s)
        now = _look_at_threads()
        if not now or (now == before and all(state == "S" for state, *_ in now.values())):
            return True
        if time.monotonic() > until:
            return False
        before = now


def _look_at_threads() -> dict[str, _Look]:
    """Return state and number of switches of each thread that runs collectives, by its id."""
    found = {}
    for task in _list_threads(_NAME):
        with suppress(OSError):  # it has just ended
            lines = (task / "status").read_text(encoding="utf-8", errors="replace").splitlines()
            fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
            found[task.name] = fields["State"][:1], *(fields[name] for name in _SWITCHES)
    return found


def _list_threads(name: str) -> list[Path]:
    """Return the folders in /proc of this process's threads of a name."""
    found = []
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError):  # it has just ended
                if (task / "comm").read_text(encoding="utf-8", errors="replace").strip() == name:
                    found.append(task)
    return found
