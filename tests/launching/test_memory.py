"""Whether the kernel killed a rank for memory: from its log, its counts, and a real kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.torchrun_scripts.memory_group import NoMemoryGroupError, count_kills, enter, memory_group
from paceline.launching.ending import memory
from paceline.launching.ending.memory import OomCounts, count_oom_kills, explain_kill

IN_GROUP = "The kernel's out-of-memory killer ended it: the memory of its cgroup (container, job) ran out."
ON_MACHINE = (
    "The kernel's out-of-memory killer most likely ended it: it killed a process on this machine at that "
    "time."
)

# Records as /dev/kmsg gives them: by a cgroup's limit, and by the machine's end.
KMSG_GROUP = (
    "3,1201,99100,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:9300000kB, "
    "anon-rss:1480000kB, file-rss:70000kB, shmem-rss:0kB, UID:0 pgtables:4000kB oom_score_adj:0\n"
)
KMSG_MACHINE = (
    "3,1202,99200,-;Out of memory: Killed process 815 (python) total-vm:9300000kB, anon-rss:3250000kB, "
    "file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:4000kB oom_score_adj:0\n"
)


class Kernel:
    """A stand-in for the kernel's files, in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.records: list[str | OSError] = []
        self.can_read_log = True
        self._open, self._read = os.open, os.read
        self._left: list[str | OSError] = []
        monkeypatch.setattr(memory, "Path", self._redirect)
        monkeypatch.setattr(memory.os, "open", self._open_log)
        monkeypatch.setattr(memory.os, "read", self._read_log)

    def write(self, path: str, text: str) -> None:
        target = self.folder / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def _redirect(self, path: str) -> Path:
        return self.folder / path.lstrip("/")

    def _open_log(self, path: Any, *args: Any, **options: Any) -> int:
        if path != "/dev/kmsg":
            return self._open(path, *args, **options)
        if not self.can_read_log:
            raise PermissionError(1, "Operation not permitted")
        self._left = list(self.records)
        self._log = self._open(os.devnull, os.O_RDONLY)
        return self._log

    def _read_log(self, fd: int, size: int) -> bytes:
        if fd != getattr(self, "_log", None):
            return self._read(fd, size)
        if not self._left:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        record = self._left.pop(0)
        if isinstance(record, OSError):
            raise record
        return record.encode()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tmp_path, monkeypatch)


# ---- the counts


def test_counts_of_a_v2_group(kernel: Kernel) -> None:
    kernel.write("/proc/vmstat", "nr_free_pages 5\noom_kill 12\n")
    kernel.write("/proc/self/cgroup", "0::/job/step\n")
    kernel.write(
        "/sys/fs/cgroup/job/step/memory.events", "low 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n"
    )
    assert count_oom_kills() == OomCounts(in_group=2, on_machine=12)


def test_counts_of_a_v1_group(kernel: Kernel) -> None:
    kernel.write("/proc/vmstat", "oom_kill 12\n")
    kernel.write("/proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/job\n0::/job\n")
    kernel.write(
        "/sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"
    )
    assert count_oom_kills() == OomCounts(in_group=5, on_machine=12)


def test_a_group_whose_path_has_a_colon(kernel: Kernel) -> None:
    kernel.write("/proc/self/cgroup", "0::/system.slice/job:a:b.scope\n")
    kernel.write("/sys/fs/cgroup/system.slice/job:a:b.scope/memory.events", "oom_kill 1\n")
    assert count_oom_kills() == OomCounts(in_group=1, on_machine=None)


def test_nothing_is_counted_where_nothing_is_reported(kernel: Kernel) -> None:
    assert count_oom_kills() == OomCounts(None, None)
    kernel.write("/proc/self/cgroup", "0::/job\n")
    kernel.write("/proc/vmstat", "nr_free_pages 5\n")
    assert count_oom_kills() == OomCounts(None, None)
    assert explain_kill(4711, OomCounts(None, None)) == ""


def test_the_counts_of_this_machine_can_be_read() -> None:
    counts = count_oom_kills()
    assert all(count is None or count >= 0 for count in (counts.in_group, counts.on_machine))


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ((2, 12), (3, 13), IN_GROUP),
        ((2, 12), (3, 12), IN_GROUP),
        ((2, 12), (2, 13), ON_MACHINE),
        ((2, 12), (2, 12), ""),
        ((None, 12), (3, 12), ""),
        ((None, 12), (None, 13), ON_MACHINE),
        ((2, None), (None, 13), ""),
        ((None, None), (1, 1), ""),
    ],
)
def test_counts_that_have_grown_explain(
    before: tuple[int | None, int | None],
    now: tuple[int | None, int | None],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    kernel: Kernel,
) -> None:
    kernel.can_read_log = False
    monkeypatch.setattr(memory, "count_oom_kills", lambda: OomCounts(*now))
    assert explain_kill(4711, OomCounts(*before)) == words


# ---- the kernel's log


def test_the_log_reports_of_the_process_itself(kernel: Kernel) -> None:
    kernel.records = ["6,1,1,-;usb 1-1: new device\n", KMSG_GROUP, KMSG_MACHINE]
    none = OomCounts(None, None)
    assert explain_kill(4711, none) == (
        "The kernel's out-of-memory killer ended it: the memory of its cgroup (container, job) ran out. "
        "It held 1.48 GB."
    )
    assert explain_kill(815, none) == (
        "The kernel's out-of-memory killer ended it: the memory of this machine ran out. It held 3.25 GB."
    )
    assert explain_kill(471, none) == "", "471 is not 4711"
    assert explain_kill(47110, none) == ""


def test_records_that_are_overwritten_are_skipped(kernel: Kernel) -> None:
    kernel.records = [BrokenPipeError(32, "Broken pipe"), KMSG_GROUP]
    assert "its cgroup" in explain_kill(4711, OomCounts(None, None))


def test_the_log_does_not_hide_the_counts(kernel: Kernel) -> None:
    kernel.records = [KMSG_MACHINE]
    kernel.write("/proc/vmstat", "oom_kill 13\n")
    assert explain_kill(4711, OomCounts(None, 12)) == ON_MACHINE


# ---- a real one

EAT = "import os\nkept = []\nwhile True: kept.append(b'x' * 2**20)\n"
WATCH = f"""
import subprocess, sys
from paceline.launching.ending.memory import count_oom_kills, explain_kill
before = count_oom_kills()
eater = subprocess.Popen([sys.executable, "-c", {EAT!r}])
print(eater.wait(), explain_kill(eater.pid, before), sep="|")
"""


def test_a_real_kill_is_explained() -> None:
    try:
        with memory_group(150_000_000) as group:
            done = subprocess.run(
                [*enter(group), sys.executable, "-c", WATCH], capture_output=True, text=True, timeout=60
            )
            num_kills = count_kills(group)
    except NoMemoryGroupError as reason:
        pytest.skip(str(reason))
    assert num_kills == 1, done.stderr
    code, _, words = done.stdout.strip().partition("|")
    assert code == "-9"
    assert words.startswith(IN_GROUP), words


def test_a_kill_that_was_not_for_memory_is_not(tmp_path: Path) -> None:
    before = count_oom_kills()
    sleeper = subprocess.Popen(["sleep", "50"])
    sleeper.kill()
    sleeper.wait()
    if count_oom_kills() != before:
        pytest.skip("the kernel has just killed another process for memory")
    assert explain_kill(sleeper.pid, before) == ""
