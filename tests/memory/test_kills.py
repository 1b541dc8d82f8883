"""The kernel ends ranks for memory, and the launcher knows what filled it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.torchrun_scripts.memory_group import NoMemoryGroupError, enter, memory_group
from tests.memory.shortages import MB, SHORTAGES

KILLED = tuple(name for name, case in SHORTAGES.items() if case.kill_mb)
# The verdict's words for a cause, where they are others.
_WORDS = {
    "kept": "tensors or arrays with",
    "kept graphs": "graphs of earlier forwards",
    "model state": "the model's state",
    "evaluation": "evaluation mode",
    "request": "one allocation",
}
ROOT = Path(__file__).parents[2]


def run(name: str, mode: str, folder: Path, prefix: list[str], nproc: int = 1) -> str:
    words = [*prefix, sys.executable, "-m", "paceline", "run", "--nproc-per-node", str(nproc)]
    words += ["-m", "tests.memory.shortages", mode, name]
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=200, check=False, cwd=folder, env=environ
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", KILLED)
def test_a_kill_is_explained(name: str, tmp_path: Path) -> None:
    case = SHORTAGES[name]
    try:
        with memory_group(case.kill_mb * MB) as group:
            told = run(name, "kill", tmp_path, enter(group), case.nproc)
    except NoMemoryGroupError as reason:
        pytest.skip(str(reason))
    # The kernel may end a worker in place of its rank.
    assert "PL331" in told or "killed by signal: Killed" in told, told
    begins = told.partition("before its end: ")[2].partition("\n  ")[0]
    assert case.at in begins or case.at in told.partition("before its end: ")[2], told
    assert _WORDS.get(case.cause, case.cause).lower() in begins.lower(), told


def test_an_error_on_one_rank_alone_is_explained(tmp_path: Path) -> None:
    told = run("long_sample_on_one_rank", "limited", tmp_path, [], nproc=2)
    assert "rank 1 failed first" in told, told
    assert "Activations filled the memory" in told, told
    assert "its batch is larger" in told, told
    assert "5 steps had fitted" in told, told


def test_an_error_in_a_script_is_explained(tmp_path: Path) -> None:
    told = run("large_batch", "limited", tmp_path, [])
    assert "PL330" in told, told
    assert "Activations filled the memory" in told, told
    assert "microbatches of" in told, told
