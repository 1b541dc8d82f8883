"""Polls the processes of ranks from outside: state, use of CPU and I/O."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from paceline.launching.watcher import WatchedRank
from paceline.watch.protocol.report import Process, ProcessState
from paceline.watch.protocol.stacks import find_watching_thread

_STATES: dict[str, ProcessState] = {
    psutil.STATUS_RUNNING: "running",
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped",
    psutil.STATUS_DISK_SLEEP: "uninterruptible",
    psutil.STATUS_ZOMBIE: "ended",
    psutil.STATUS_DEAD: "ended",
}


# The system counts CPU time in hundredths of a second, so a share over less time than this is meaningless.
_LEAST_S = 0.5


@dataclass
class _Sample:
    """The resources that a rank and its descendants had used at an instant, and their rates since the last
    one.

    Attributes:
        cpu_s: seconds of CPU, by process.
        io_bytes: bytes read and written, by process.
        rate: bytes per second.
    """

    time_s: float
    cpu_s: dict[int, float] = field(default_factory=dict)
    io_bytes: dict[int, float] = field(default_factory=dict)
    share: float = 0.0
    rate: float = 0.0


class ProcessSampler:
    """A sampler of the ranks' processes on this node.

    Args:
        node: name of this machine.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._before: dict[int, _Sample] = {}
        self._watching: dict[int, Path] = {}  # by process, where the I/O of its watching thread is

    def sample(self, ranks: Sequence[WatchedRank], *, is_kept: bool = True) -> dict[int, Process]:
        """Return the state of each rank's process, by rank, with its use since the last one that was kept."""
        return {watched.rank: self._sample_one(watched, is_kept=is_kept) for watched in ranks}

    def _sample_one(self, watched: WatchedRank, *, is_kept: bool) -> Process:
        if watched.exit_code is not None or watched.pid == 0:
            state: ProcessState = "ended" if watched.exit_code is not None else "sleeping"
            return Process(watched.rank, self._node, watched.pid, state, exit_code=watched.exit_code)
        before, now = self._before.get(watched.pid), _Sample(time.monotonic())
        state = "ended"
        try:
            process = psutil.Process(watched.pid)
            state = _STATES.get(process.status(), "sleeping")
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            family = []
        for member in family:
            with suppress(psutil.Error):
                times = member.cpu_times()
                now.cpu_s[member.pid] = times.user + times.system
                moved = member.io_counters()
                own = self._read_watching(member.pid) if member is process else 0
                now.io_bytes[member.pid] = moved.read_chars + moved.write_chars - own
        if before is None or now.time_s - before.time_s >= _LEAST_S:
            if before is not None:
                seconds = now.time_s - before.time_s
                now.share = _add_up(before.cpu_s, now.cpu_s) / seconds
                now.rate = _add_up(before.io_bytes, now.io_bytes) / seconds
            if is_kept:
                self._before[watched.pid] = now
        else:
            now.share, now.rate = before.share, before.rate
        return Process(watched.rank, self._node, watched.pid, state, cpu_share=now.share, io_rate=now.rate)

    def _read_watching(self, pid: int) -> int:
        """Return the bytes that the rank's watching thread has read and written; 0 while it has none.

        It reads the memory's limits and sends beats all the time, more bytes than `BUSY_BYTES_PER_S`: without
        this, no watched rank would ever count as still.
        """
        with suppress(OSError, KeyError):  # The process or a thread may end meanwhile.
            if pid not in self._watching:
                self._watching[pid] = find_watching_thread(pid) / "io"
            lines = self._watching[pid].read_text(encoding="ascii").splitlines()
            return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
        return 0


def _add_up(before: Mapping[int, float], now: Mapping[int, float]) -> float:
    """Return what was used between two samples; a process that has started since counts in full."""
    return max(0.0, sum(value - before.get(pid, 0.0) for pid, value in now.items()))
