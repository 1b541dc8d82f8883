"""Recorded jobs that end in unusual ways: what is there is kept, and the report says what is missing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.memory.steps import StepMemory
from paceline.profiling.rank.recorder import RecordSettings, StepRecorder
from paceline.profiling.rank_trace import BACKWARD, FORWARD, OPTIMIZER
from paceline.profiling.read import read_traces
from tests.profiling.timelines import clip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

SCRIPT = """
import os, time, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Linear(4, 4)
{wrap}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range({steps}):
    if step == 12:
        print("step 12", flush=True)
    model(torch.ones(2, 4)).sum().backward()
    {then}
dist.destroy_process_group()
"""
WRAP = "model = nn.parallel.DistributedDataParallel(model)"


def start(folder: Path, text: str, *flags: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(text)
    words = ["--nproc-per-node", "2", "--out", str(folder / "traces"), "--from", "5", "--steps", "5000"]
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "profile", *words, *flags, "script.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 75)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_job_that_is_stopped_keeps_what_it_has_recorded(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    job = start(tmp_path, SCRIPT.format(wrap=WRAP, steps=100_000, then="optimizer.step(); time.sleep(0.01)"))
    assert job.stdout is not None
    assert any("step 12" in line for line in job.stdout)
    if number == signal.SIGINT:
        os.killpg(job.pid, number)  # as a terminal sends it: to all processes
    else:
        job.send_signal(number)
    output, error = job.communicate(timeout=120)
    assert job.returncode == code, error
    assert "Traceback" not in output + error
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "rank-0000.json",
        "rank-0001.json",
    ]
    assert re.search(r"The recording is partial, with \d+ of 5000 steps: the script ended", error)
    assert "ms per step (median)" in error


def test_a_rank_that_ends_early_is_reported_with_its_steps(tmp_path: Path) -> None:
    then = "optimizer.step()\n    if rank == 1 and step == 9: break"
    job = start(tmp_path, SCRIPT.format(wrap="", steps=14, then=then))
    _, error = job.communicate(timeout=120)
    assert job.returncode == 0, error
    assert "Traceback" not in error
    assert (
        "The traces have different numbers of steps (rank 0 10, rank 1 6): common ones are compared." in error
    )
    assert "ranks 0 and 1 of 2, steps 5 to 10" in error


def test_a_job_without_an_optimizer_step_is_one_message(tmp_path: Path) -> None:
    job = start(tmp_path, SCRIPT.format(wrap=WRAP, steps=14, then="pass"))
    _, error = job.communicate(timeout=120)
    assert job.returncode == 0, error
    assert "Traceback" not in error
    assert error.count("[PL") == 1
    assert "no rank has recorded a step" in error
    assert "[PL907]" in error


@pytest.mark.parametrize(
    ("then", "codes"),
    [
        ("torch.profiler.profile().__enter__(); optimizer.step()", {"PL924"}),
        ("if rank == 0: dist.barrier()\n    time.sleep(1000)", {"PL800"}),
    ],
    ids=["PL924", "a hang"],
)
def test_the_reason_without_a_recording_is_the_only_one(then: str, codes: set[str], tmp_path: Path) -> None:
    """Neither a rank that could not record nor a hang is told to run longer."""
    text = SCRIPT.format(wrap="", steps=8, then=then).replace("        print", "        print")
    job = start(tmp_path, text, "--hang-after", "4")
    _, error = job.communicate(timeout=120)
    assert set(re.findall(r"PL9\d\d|PL8\d\d", error)) == codes, error


def test_a_compiled_model_is_recorded_without_compiling_again(tmp_path: Path) -> None:
    compiled = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal compiled
        compiled += 1
        return graph.forward

    model = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), backend=count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = StepRecorder(0, RecordSettings(str(tmp_path), after=2, steps=3), StepMemory())
    recorder.install(torch)
    for step in range(9):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            before = compiled
    recorder.finish()
    assert recorder.failure == ""
    assert compiled == before == 1
    (trace,) = read_traces([tmp_path])
    assert [step.number for step in trace.steps] == [4, 5, 6]
    for step in trace.steps:
        for phase in (FORWARD, BACKWARD):
            assert len(clip(trace.phases[phase], step.begin_ns, step.end_ns)) == 1, phase
        assert len(clip(trace.phases[OPTIMIZER], step.begin_ns, step.end_ns)) >= 1  # zero_grad too
