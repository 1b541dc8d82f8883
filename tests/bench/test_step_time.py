"""The benchmark against hand-written loops runs, and counts what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "step_time"


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "run.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_quick_run_keeps_raw_times_and_prints_a_table(tmp_path: Path) -> None:
    done = run(*("--size", "0.13M", "--only", "hand", "--microbatches", 2, "--blocks", 3, "--out", tmp_path))
    assert done.returncode in (0, 1), done.stderr  # 1: three blocks don't reach the limit
    result = json.loads((tmp_path / "0.13M-hand-2.json").read_text())
    assert result["num_parameters"] == 129_344
    assert {name: len(times) for name, times in result["block_s"].items()} == {
        "paceline": 3,
        "hand_written": 3,
    }
    # Both train: from 5.55 = ln 256 about as far down in the same 30 steps.
    losses = result["losses"]
    assert losses["hand_written"] < 5.5
    assert losses["paceline"] == pytest.approx(losses["hand_written"], abs=0.3)
    assert "| paceline |" in done.stdout
    assert "(75%) | 3 |" in done.stdout


@pytest.mark.parametrize("words", [("--size", "7B"), ("--only", "everything")])
def test_refuses_what_it_does_not_know(words: tuple[str, str]) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert words[1] in done.stderr
