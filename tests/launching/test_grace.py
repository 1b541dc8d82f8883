"""`--grace-s`: ranks know how long they have after a signal, and are killed after it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.launching.launched import Launched, paceline_run

# Ignores SIGTERM.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("grace", os.environ["PACELINE_GRACE_S"], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        (["--grace-s", "1.5"], {}, "grace 1.5"),
        pytest.param(
            ["--grace-s", "100", "--shutdown-timeout", "1"], {}, "grace 1\n", marks=pytest.mark.slow
        ),
        pytest.param([], {"PACELINE_GRACE_S": "1.2"}, "grace 1.2", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_do_not_leave_in_time_are_killed(
    words: list[str], env: dict[str, str], told: str, tmp_path: Path
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    command = paceline_run("--no-watch", *words, str(tmp_path / "stubborn.py"))
    with Launched(tmp_path, command, env=env) as job:
        job.wait_for(told, 60)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(25) == 75
        job.wait_for("stopped by SIGTERM; 1 did not leave in time and were killed", 5)


@pytest.mark.parametrize("command", [["run", "train.py"], ["train", "recipes/gpt-stdlib.toml"]])
def test_a_grace_of_less_than_a_second_is_refused(command: list[str]) -> None:
    words = [*paceline_run()[:1], command[0], "--grace-s", "0", *command[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--grace-s 0. It is the number of seconds" in done.stderr
    assert "[PL366]" in done.stderr
