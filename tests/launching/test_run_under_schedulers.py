"""`paceline run` under real SLURM and real mpirun: a task becomes a rank, or the launcher of a node."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launching.launched import Launched, paceline_run, script

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,vader")
LIMIT_S = 60


def run(folder: Path, words: Sequence[str], env: dict[str, str]) -> tuple[int, str]:
    """Return the exit code and the output; check that nothing of it is left."""
    with Launched(folder, words, env=env) as job:
        code = job.wait(LIMIT_S)
        assert not (left := job.find_left(10, ("ompi.", "openmpi-"))), f"left: {left}"
        return code, job.text


def read_sums(text: str) -> list[str]:
    """Return the output of the ranks."""
    return sorted(re.findall(r"sum .*", text))


@pytest.fixture
def slurm_env(slurm: dict[str, str]) -> dict[str, str]:
    return {name: slurm[name] for name in ("SLURM_CONF", "PATH")}


SUMS = [f"sum 3 on {rank} of 2, {rank} 2 0 -" for rank in range(2)]


def test_each_task_of_srun_becomes_a_rank(slurm_env: dict[str, str], tmp_path: Path) -> None:
    code, text = run(tmp_path, ["srun", "-n2", *paceline_run(script("sums.py"))], slurm_env)
    assert (code, read_sums(text)) == (0, SUMS), text


def test_one_task_of_srun_starts_the_ranks_of_its_node(slurm_env: dict[str, str], tmp_path: Path) -> None:
    words = ["srun", "-n1", *paceline_run("--nproc-per-node", "2", script("sums.py"))]
    code, text = run(tmp_path, words, slurm_env)
    assert (code, read_sums(text)) == (0, SUMS), text


def test_two_launchers_on_one_node_are_refused(slurm_env: dict[str, str], tmp_path: Path) -> None:
    words = ["srun", "-n2", *paceline_run("--nproc-per-node", "2", script("sums.py"))]
    code, text = run(tmp_path, words, slurm_env)
    assert code == 2, text
    assert text.count("[PL348]") == 2, text
    assert "Traceback" not in text


def test_a_failing_task_of_srun_ends_the_step(slurm_env: dict[str, str], tmp_path: Path) -> None:
    words = ["srun", "-n2", "--kill-on-bad-exit", *paceline_run(script("sums.py"))]
    code, text = run(tmp_path, words, {**slurm_env, "FAIL": "1"})
    assert code != 0, text
    assert "ValueError: rank 1 fails on purpose" in text


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_each_process_of_mpirun_becomes_a_rank(tmp_path: Path) -> None:
    words = [*MPIRUN, "--mca", "oob_tcp_if_include", "lo", "-np", "2", *paceline_run(script("sums.py"))]
    code, text = run(tmp_path, words, {})
    assert (code, read_sums(text)) == (0, SUMS), text
