"""However `paceline run` ends, nothing of it is left; all events and kinds: tests/chaos/launcher.py."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.chaos.launcher_cases.interrupts import check_early, check_once, check_twice
from tests.chaos.launcher_cases.orphans import check_orphans
from tests.launching.launched import Launched, paceline_run, script

pytestmark = pytest.mark.timeout(100)


@pytest.mark.parametrize(
    ("event", "kind", "is_cold"),
    [
        ("SIGTERM", "loader-fork", False),
        ("SIGTERM", "ignores SIGTERM", True),
        ("closed terminal", "daemon", False),
        ("SIGKILL launcher", "spawn", False),
        ("SIGKILL keeper", "daemon", False),
        ("SIGKILL pump", "plain", False),
    ],
)
def test_nothing_is_left(tmp_path: Path, event: str, kind: str, is_cold: bool) -> None:
    check_orphans(tmp_path, event=event, kind=kind, is_cold=is_cold)


def test_ctrl_c_lets_ranks_save(tmp_path: Path) -> None:
    check_once(tmp_path, by_terminal=True, is_cold=False)


def test_a_second_ctrl_c_ends_ranks_at_once(tmp_path: Path) -> None:
    check_twice(tmp_path, by_terminal=True, is_cold=False)


def test_ctrl_c_before_there_are_ranks(tmp_path: Path) -> None:
    check_early(tmp_path, after_s=1.0, name="Ctrl-C", is_cold=False)


def test_a_parent_that_blocks_all_signals(tmp_path: Path) -> None:
    block = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); "
    words = [sys.executable, "-c", block + "os.execv(sys.argv[1], sys.argv[1:])"]
    words += paceline_run("--nproc-per-node", "2", script("sums.py"), "100000")
    with Launched(tmp_path, words) as job:
        job.wait_for("runs as", 60, count=2)
        job.signal(signal.SIGTERM)
        assert job.wait(40) == 75, job.text
    with Launched(tmp_path, [*words[:-1], "2"]) as job:
        assert job.wait(60) == 0, job.text
