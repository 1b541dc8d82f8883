"""Batch scripts with the usual mistakes, and the rendered one; the slow tests use a real SLURM."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.launching.flags import add_torchrun_flags
from paceline.launching.run_script import run_script

TASK = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NODELIST": "node[0-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}


def read_flags(folder: Path, *words: str) -> argparse.Namespace:
    (folder / "train.py").write_text("raise SystemExit(3)\n")
    parser = argparse.ArgumentParser()
    add_torchrun_flags(parser, {})
    return parser.parse_args([*words, str(folder / "train.py")])


@pytest.mark.parametrize(
    ("env", "code", "told"),
    [
        ({}, "PL363", "--node-rank 0 on node 3 of 4."),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1"}, "PL348", "in 2 tasks on one node"),
        # The flags come before what the script exports, so the faults of the flags are left.
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "PL363", "--node-rank 0 on node 3 of 4."),
    ],
)
def test_a_launcher_refuses(
    env: dict[str, str], code: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**TASK, **env}.items():
        monkeypatch.setenv(name, value)
    words = ["--nnodes", "4", "--nproc-per-node", "8", "--node-rank", "0", "--master-addr", "node0"]
    with pytest.raises(PacelineError) as caught:
        run_script(read_flags(tmp_path, *words))
    assert caught.value.code == code
    assert told in str(caught.value)


# ---- on a real SLURM

BIN = str(Path(sys.executable).parent)
START = (
    "from paceline.world import start\nwith start(device='cpu', timeout_s=5) as world:\n    print(world)\n"
)


def run_batch(env: dict[str, str], folder: Path, text: str, *words: str) -> str:
    """Submit a batch script, wait until its job has ended, and return its output."""
    (folder / "train.py").write_text(START)
    (folder / "job.sh").write_text("#!/bin/bash\n" + text)
    command = ["sbatch", "--wait", f"--output={folder}/out", f"--chdir={folder}", *words, "job.sh"]
    subprocess.run(command, env=env, cwd=folder, capture_output=True, timeout=120)
    return (folder / "out").read_text()


@pytest.mark.slow
def test_the_usual_mistakes(slurm: dict[str, str], tmp_path: Path) -> None:
    exports = "export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=$SLURM_NTASKS RANK=$SLURM_PROCID\n"
    text = exports + f"export LOCAL_RANK=$SLURM_LOCALID\nsrun {sys.executable} train.py\n"
    out = run_batch(slurm, tmp_path, text, "-n2")
    assert [out.count(f"RANK=0 in task {task} of the 2 that srun started") for task in (0, 1)] == [1, 1], out
    text = f"srun {BIN}/paceline run --nnodes=1 --nproc_per_node=2 --node_rank=$SLURM_NODEID train.py\n"
    out = run_batch(slurm, tmp_path, text, "-n2")
    assert out.count("[PL348]") == 2, out


RECIPE = """
[model]
kind = "gpt"
layers = 2
hidden = 32
heads = 2
[data]
kind = "text"
files = ["python-stdlib"]
tokenizer = "bytes"
seq_len = 64
[train]
steps = 1500 # an idle machine takes 400 before SLURM has preempted the job
global_batch_size = 8
microbatch_size = 4
threads_per_rank = 1
[layout]
dp_replicate = "auto"
[checkpoint]
every = 1000
"""
LIMIT_S = 400


def paceline(env: dict[str, str], folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "paceline", *words]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for(path: Path, pattern: str, count: int = 1) -> None:
    """Wait until a file has so many matches."""
    end_s = time.monotonic() + LIMIT_S
    while len(re.findall(pattern, text := path.read_text() if path.exists() else "")) < count:
        assert time.monotonic() < end_s, f"no {pattern!r} in:\n{text}"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_goes_on_to_the_same_weights(two_nodes: dict[str, str], tmp_path: Path) -> None:
    env = {**two_nodes, "PATH": f"{BIN}:{two_nodes['PATH']}", "GLOO_SOCKET_IFNAME": "lo"}

    def slurm(*words: str) -> str:
        return subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    def start_now() -> None:
        """Start the requeued job, for which SLURM would wait two minutes."""
        wait_for(out, "requeued\n", starts)
        end_s = time.monotonic() + 60
        while "BeginTime" not in slurm("squeue", "-h", "-j", job, "-o", "%r"):
            assert time.monotonic() < end_s
            time.sleep(0.2)
        # SLURM's times are seconds: a start in the second of the requeue is refused ("credential revoked").
        time.sleep(2)
        slurm("scontrol", "update", f"JobId={job}", "StartTime=now")

    (tmp_path / "tiny.toml").write_text(RECIPE)
    words = ["launch", "slurm", "--nodes", "2", "--time", "20", "--output", "job.out", "--submit", "--json"]
    job = json.loads(paceline(env, tmp_path, *words, "tiny.toml"))["submitted"]
    out, metrics = tmp_path / "job.out", tmp_path / "runs" / "tiny" / "metrics.jsonl"

    # The signal that SLURM sends before the time limit.
    wait_for(metrics, "\n", 20)
    slurm("scancel", "--signal=USR1", "--batch", job)
    starts = 1
    start_now()
    assert "stopped by the time limit, not finished" in out.read_text()

    # A job that preempts it.
    wait_for(out, r"step \d+/1500", 2)
    before = len(metrics.read_text().splitlines())
    wait_for(metrics, "\n", before + 20)
    slurm("sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap", "sleep 1")
    starts = 2
    start_now()
    assert "stopped by preemption, not finished" in out.read_text()

    wait_for(out, "finished\n", 3)
    assert out.read_text().rstrip().endswith(f"job {job}: finished")
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 1501)), "each step is taken once"
    newest = max((tmp_path / "runs" / "tiny" / "checkpoints").glob("step-*"))
    identity = json.loads((newest / "manifest.json").read_text())["identity"]
    assert (identity["slurm_job"], identity["slurm_restart"], identity["world_size"]) == (job, 2, 2)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    paceline(plain, tmp_path, "train", "tiny.toml", "--nproc", "1", "--out", "whole", "--json")
    hashes = [paceline(plain, tmp_path, "checkpoint", "hash", folder) for folder in ("runs/tiny", "whole")]
    assert hashes[0] == hashes[1]
