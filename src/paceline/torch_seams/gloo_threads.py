"""Waits until gloo's threads need Python's lock no more; nothing of torch is imported.

Such a thread releases the tensors of a collective after it has woken those who wait for the result. If Python
has one of these tensors too, or autograd's context, the thread needs Python's lock for that. A script that
meanwhile destroys the group and drops its DDP model waits for the thread while it holds the lock: the
destructor of DDP's reducer joins the group's threads. The process then sleeps forever (torch 2.11 to 2.13).
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LEAST_S = 0.01
_MOST_S = 10.0
_TASKS = Path("/proc/self/task")
_SWITCHES = "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"

_Look = tuple[str, ...]


def await_gloo_threads(most_s: float = _MOST_S) -> bool:
    """Return once no thread of gloo runs or waits for Python's lock; whether that is so.

    A thread that waits for the lock wakes once per switch interval to ask for it. So a thread that sleeps and
    has not woken for longer than that waits for a collective. On systems without Linux's /proc, this only
    sleeps for a moment without the lock.

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
    """Return state and number of switches of each thread of gloo, by its id."""
    found = {}
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError):  # it has just ended
                if (task / "comm").read_text(encoding="utf-8", errors="replace").strip() == _NAME:
                    lines = (task / "status").read_text(encoding="utf-8", errors="replace").splitlines()
                    fields = {
                        name: value.strip() for name, _, value in (line.partition(":") for line in lines)
                    }
                    found[task.name] = fields["State"][:1], *(fields[name] for name in _SWITCHES)
    return found
