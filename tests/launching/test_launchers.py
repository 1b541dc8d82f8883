"""Real mpirun and real SLURM, where they are installed (tests/install_components.sh)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch, torch.distributed as dist
from paceline.place import is_launched
from paceline.world import start
import os
with start(device="cpu", timeout_s=40) as world:
    x = torch.tensor([world.rank + 1])
    dist.all_reduce(x)
    sys.stdout.write(f"{world.launcher} {world.rank} of {world.world_size}, local {world.local_rank} of "
                     f"{world.local_world_size}, sum {x.item()}, launched {is_launched(os.environ)}\\n")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


# ---- Open MPI

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")


@needs_mpirun
@pytest.mark.parametrize("nproc", [1, 2])
def test_mpirun(script: str, nproc: int) -> None:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,vader"]
    command += ["--mca", "oob_tcp_if_include", "lo", "-np", str(nproc), sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    expected = [f"mpi {r} of 2, local {r} of 2, sum 3, launched True" for r in range(2)]
    if nproc == 1:
        expected = ["single 0 of 1, local 0 of 1, sum 1, launched False"]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


# ---- SLURM: see conftest.py


def test_srun(slurm: dict[str, str], script: str) -> None:
    command = ["srun", "-n2", sys.executable, script]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=90)
    assert sorted(done.stdout.splitlines()) == [
        f"slurm {rank} of 2, local {rank} of 2, sum 3, launched True" for rank in range(2)
    ], done.stderr


def test_a_batch_script_is_a_plain_process(slurm: dict[str, str], script: str) -> None:
    out = Path(script).with_name("out")
    command = ["sbatch", "--wait", "-n2", f"--output={out}", "--wrap", f"{sys.executable} {script}"]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert out.read_text() == "single 0 of 1, local 0 of 1, sum 1, launched False\n"
