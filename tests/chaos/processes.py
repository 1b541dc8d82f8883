"""Finds the processes of a start, and the role of each."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from tests.chaos.setting import MARK

ROLES = (
    "launcher",
    "rank 0",
    "another rank",
    "loader worker",
    "keeper",
    "fork server",
    "pump",
    "resource tracker",
)


def find_marked(mark: str) -> list[psutil.Process]:
    """Return all living processes of the start `mark`, those included whose parent is gone."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def sort_by_role(processes: Iterable[psutil.Process], launcher_pid: int, tmp: Path) -> dict[str, list[int]]:
    """Return process ids by role; a role that no process has (yet) is left out."""
    ranks: dict[int, int] = {}
    for path in tmp.glob("paceline-launch-*/began-*"):
        with contextlib.suppress(OSError, ValueError):  # just being written, or cleared
            ranks[int(path.read_text())] = int(path.name.removeprefix("began-"))
    by_role: dict[str, list[int]] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            role = _role(process, launcher_pid, ranks)
            if role is not None:
                by_role.setdefault(role, []).append(process.pid)
    return by_role


def _role(process: psutil.Process, launcher_pid: int, ranks: dict[int, int]) -> str | None:
    if process.pid == launcher_pid:
        return "launcher"
    if process.pid in ranks:
        return "rank 0" if ranks[process.pid] == 0 else "another rank"
    words = " ".join(process.cmdline())
    if "pump.py" in words:
        return "pump"
    if "processes.keeper" in words and process.pid not in ranks and process.ppid() in (launcher_pid, 1):
        return "keeper"
    if "resource_tracker" in words:
        return "resource tracker"
    parent = process.parent()
    if parent is None or "forkserver" not in words:
        return None  # an orphan, or just being made
    if parent.pid in ranks:
        return "fork server"  # the one from which a rank's loader workers come
    if parent.ppid() in ranks:
        return "loader worker"
    return None  # a rank that has not begun


class Activity:
    """Measures for how long the processes of a start have wanted no core, as only hung ones do."""

    def __init__(self, mark: str, every_s: float = 5.0) -> None:
        self._mark = mark
        self._every_s = every_s
        self._wanted_s: dict[int, float] = {}
        self._looked_s = self._active_s = time.monotonic()

    def measure_idle_s(self) -> float:
        """Seconds since they last computed, or waited for a core, for a tenth of the time of a look."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= self._every_s:
            wanted_s = {process.pid: _read_wanted_s(process.pid) for process in find_marked(self._mark)}
            grown_s = sum(
                max(0.0, seconds - self._wanted_s.get(pid, 0.0)) for pid, seconds in wanted_s.items()
            )
            if grown_s > 0.1 * (now_s - self._looked_s):
                self._active_s = now_s
            self._wanted_s, self._looked_s = wanted_s, now_s
        return now_s - self._active_s


def _read_wanted_s(pid: int) -> float:
    """Seconds in which the main thread of a process had a core or waited for one (proc_pid_schedstat(5))."""
    try:
        computed_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0
    return (int(computed_ns) + int(waited_ns)) / 1e9


def kill(pids: Iterable[int]) -> int:
    """Send SIGKILL to all of them; return their number."""
    killed = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def wait_until_gone(mark: str, limit_s: float) -> list[int]:
    """Wait for all processes of a start to end; return those that are left after the limit."""
    deadline = time.monotonic() + limit_s
    while (left := find_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [process.pid for process in left]
