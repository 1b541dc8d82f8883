"""Whether the kernel killed a rank for memory: from its counts, and a real kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.torchrun_scripts.memory_group import NoMemoryGroupError, count_kills, enter, memory_group
from paceline.launching.ending import oom_kills
from paceline.launching.ending.oom_kills import OomCounts, count_oom_kills, explain_kill

IN_GROUP = "The kernel's out-of-memory killer ended it: the memory of its cgroup (container, job) ran out."
ON_MACHINE = (
    "The kernel's out-of-memory killer most likely ended it: it killed a process on this machine at that "
    "time."
)


class Kernel:
    """A stand-in for the kernel's files, in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setattr(oom_kills, "Path", self._redirect)

    def write(self, path: str, text: str) -> None:
        target = self.folder / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def _redirect(self, path: str) -> Path:
        return self.folder / path.lstrip("/")


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
    assert explain_kill(OomCounts(None, None)) == ""


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
    monkeypatch.setattr(oom_kills, "count_oom_kills", lambda: OomCounts(*now))
    assert explain_kill(OomCounts(*before)) == words


# ---- a real one

EAT = "import os\nkept = []\nwhile True: kept.append(b'x' * 2**20)\n"
WATCH = f"""
import subprocess, sys
from paceline.launching.ending.oom_kills import count_oom_kills, explain_kill
before = count_oom_kills()
eater = subprocess.Popen([sys.executable, "-c", {EAT!r}])
print(eater.wait(), explain_kill(before), sep="|")
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
    assert explain_kill(before) == ""
