"""Recording real ranks: causes that are planted are named with rank and phase, and what is there is kept."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.memory.steps import StepMemory
from paceline.profiling.analysis import Profile, analyse
from paceline.profiling.judge import judge_profile
from paceline.profiling.launcher import prepare_folder
from paceline.profiling.rank.recorder import RecordSettings, StepRecorder
from paceline.profiling.rank_trace import (
    BACKWARD,
    COLLECTION,
    DATA,
    FORWARD,
    HOST,
    OPTIMIZER,
    READING,
)
from paceline.profiling.read import read_traces
from tests.profiling.timelines import clip

# Long against the steps of a busy machine, which take some milliseconds on an idle one.
PAUSE_S = 0.15


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._pause_s)
        return torch.full((16,), float(index))


class Pausing(nn.Module):
    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self._pause_s = pause_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._pause_s)
        return x


def read_many(x: torch.Tensor) -> None:
    until = time.monotonic() + PAUSE_S
    while time.monotonic() < until:
        x.sum().item() if x.numel() > 1 else x.item()


def collect_much() -> None:
    until = time.monotonic() + PAUSE_S
    while time.monotonic() < until:
        gc.collect()


def train(world: Any, folder: str, late: int, cause: str) -> None:
    """Train a small model for some steps, with a cause of waiting on one rank; runs on every rank."""
    is_late = world.rank == late
    recorder = StepRecorder(world.rank, RecordSettings(folder, after=1, steps=3), StepMemory())
    recorder.install(torch)
    pause_s = PAUSE_S if is_late else 0.0
    loader = DataLoader(Numbers(pause_s / 4 if cause == DATA else 0.0), batch_size=4)
    layers = [nn.Linear(16, 64), Pausing(pause_s if cause == FORWARD else 0.0), nn.Linear(64, 1)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batches = iter(loader)
    for _ in range(6):
        loss = model(next(batches)).mean()
        if is_late and cause == READING:
            read_many(loss)
        optimizer.zero_grad()
        if is_late and cause == COLLECTION:
            collect_much()
        loss.backward()
        optimizer.step()
    recorder.finish()


def record(ranks: Any, folder: Path, late: int, cause: str) -> Profile:
    ranks.run(train, nproc=2, args=(str(folder), late, cause))
    return analyse(read_traces([folder]))


FUNCTIONS = {
    DATA: "__getitem__",
    FORWARD: "forward",
    COLLECTION: "collect_much",
    READING: "read_many",
}


@pytest.mark.parametrize(
    ("late", "cause"), [(1, DATA), (0, FORWARD), (1, COLLECTION), (0, READING)], ids=lambda value: str(value)
)
def test_a_planted_cause_is_named(ranks: Any, tmp_path: Path, late: int, cause: str) -> None:
    profile = record(ranks, tmp_path, late, cause)
    assert profile.steps == (3, 4, 5)
    worst = profile.blames[0]
    # Reading a value costs time of its own only where it waits for a GPU.
    phase = HOST if cause == READING else cause
    assert (worst.rank, worst.phase, worst.waiters) == (late, phase, (1 - late,))
    assert worst.place is not None
    assert (worst.place.file, worst.place.function) == (__file__, FUNCTIONS[cause])
    if cause == FORWARD:
        assert worst.place.module == "1"
    assert worst.lost_ns > 0.5 * PAUSE_S * 1e9
    assert profile.num_matched >= 3
    for row in profile.rows:
        assert row.phases[OPTIMIZER] > 0
        assert row.phases[BACKWARD] > 0
        assert row.phases[FORWARD] > 0
        assert {traffic.operation for traffic in row.traffic} == {"all_reduce"}
        # DDP reduces all weights in one bucket.
        assert sum(traffic.num_bytes or 0 for traffic in row.traffic) == 4 * (16 * 64 + 64 + 64 + 1)


LOOP = """
import os, signal, sys, time, torch
from torch import nn
{before}
model = nn.Linear(4, 4)
{wrap}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(12):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 8:
        {at_8}
"""
JOIN = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
ALONE = """
from paceline.profiling.rank.recorder import RecordSettings, StepRecorder
StepRecorder(0, RecordSettings({folder!r}, after=3, steps=50)).install(torch)
"""


@pytest.mark.parametrize(
    ("at_8", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT),
        ("break", 0),
    ],
    ids=["SIGTERM", "SIGINT", "the script ends"],
)
def test_what_is_there_is_kept(tmp_path: Path, at_8: str, code: int) -> None:
    script = LOOP.format(before=ALONE.format(folder=str(tmp_path)), wrap="", at_8=at_8)
    done = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert done.returncode == code
    (trace,) = read_traces([tmp_path])
    assert [step.number for step in trace.steps] == [5, 6, 7, 8, 9]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0000.json"]
    reason = "the script ended, or was stopped, before the others"
    assert trace.remarks == (f"The recording is partial, with 5 of 50 steps: {reason}.",)


@pytest.mark.parametrize("first", [1, 6], ids=["before the recording", "during the recording"])
def test_a_script_that_profiles_itself_is_left_alone(tmp_path: Path, first: int) -> None:
    script = f"""
import torch
from torch.profiler import ProfilerActivity, profile
{ALONE.format(folder=str(tmp_path))}
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(10):
    if step == {first}:
        own = profile(activities=[ProfilerActivity.CPU])
        own.start()
    weight.sum().backward()
    optimizer.step()
    if step == 8:
        own.stop()
        print(len(own.events()) > 10)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
    assert "rank 0 records no trace: RuntimeError: the script runs torch.profiler itself" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.failed"]


def test_a_script_is_recorded_unmodified(tmp_path: Path) -> None:
    """Rank 1 fails before the recording is complete: the report follows all the same."""
    script, folder = tmp_path / "script.py", tmp_path / "traces"
    wrap = "model = nn.parallel.DistributedDataParallel(model)"
    script.write_text(LOOP.format(before=JOIN, wrap=wrap, at_8="raise ValueError('enough')"))
    words = ["--nproc-per-node", "2", "--out", str(folder), "--from", "5", "--steps", "50", "--json"]
    command = [sys.executable, "-m", "paceline", "profile", *words, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1, done.stderr
    assert "profiler_start" not in done.stderr, "lines of torch's profiler"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0000.json", "rank-0001.json"]
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    (report,) = [line["profile"] for line in lines if "profile" in line]
    assert report["steps"] == [5, 6, 7, 8, 9]
    assert report["num_unmatched"] == 0
    traffic = [each for row in report["rows"] for each in row["traffic"]]
    assert {each["group"] for each in traffic} == {"0"}
    assert {each["at"] for each in traffic} == {"script.py:11 in <module>"}


def test_a_folder_with_traces_is_refused(tmp_path: Path) -> None:
    assert prepare_folder(tmp_path / "new" / "folder").is_dir()
    (tmp_path / "rank-0000.json").write_text("{}")
    with pytest.raises(PacelineError, match=r"already has rank-0000.json.*\[PL906\]"):
        prepare_folder(tmp_path)
    with pytest.raises(PacelineError, match=r"cannot be made.*\[PL906\]"):
        prepare_folder(tmp_path / "rank-0000.json" / "below")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "{}/t", "--no-watch"], "a recording with --no-watch"),
    ],
)
def test_flags_that_do_not_fit(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(tmp_path) for word in words]
    assert main(["train", "recipes/gpt-stdlib.toml", "--out", str(tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "[PL905]" in error
    assert not (tmp_path / "run").exists()


def test_recording_needs_paceline_as_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    words = ["train", "recipes/gpt-stdlib.toml", "--out", str(tmp_path / "run"), "--profile", str(tmp_path)]
    assert main(words) == 2
    assert "under torchrun, srun or mpirun" in capsys.readouterr().err


def test_a_job_that_recorded_nothing_is_one_message(tmp_path: Path) -> None:
    from argparse import Namespace

    from paceline.cli.profiling import report_recording

    with pytest.raises(PacelineError, match=r"no rank has recorded a step in .*\[PL907\]"):
        report_recording(Namespace(profile=tmp_path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "2"], "--from 2."),
        (["--steps", "0"], "--steps 0"),
        (["--nnodes", "2"], "--nnodes 2 without --out"),
        ([], "script.py does not exist"),
    ],
)
def test_flags_of_profile_that_do_not_fit(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    def stop(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", stop)
    try:
        code = main(["profile", *words, "script.py"])
    except SystemExit as end:  # as `paceline run` ends
        code = end.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "[PL907]" not in error
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_a_recording_stays(tmp_path: Path) -> None:
    recorder = StepRecorder(0, RecordSettings(str(tmp_path), after=1, steps=2), StepMemory())
    recorder.install(torch)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = len(model._forward_hooks), torch.autograd.backward
    for _ in range(14):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    recorder.finish()
    (trace,) = read_traces([tmp_path])
    assert [step.number for step in trace.steps] == [3, 4]
    assert (len(model._forward_hooks), torch.autograd.backward) == hooks
    for step in trace.steps:
        own = {name for name, spans in trace.phases.items() if len(clip(spans, step.begin_ns, step.end_ns))}
        assert own == {FORWARD, BACKWARD, OPTIMIZER}


class OwnSGD(torch.optim.SGD):
    """A step that calls the step of the class above, which torch has wrapped too."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)


def test_a_step_within_a_step_counts_once(tmp_path: Path) -> None:
    recorder = StepRecorder(0, RecordSettings(str(tmp_path), after=1, steps=2), StepMemory())
    recorder.install(torch)
    model = nn.Linear(4, 4)
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = OwnSGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    recorder.finish()
    (trace,) = read_traces([tmp_path])
    assert [step.number for step in trace.steps] == [3, 4]
    assert all(len(clip(trace.phases[BACKWARD], step.begin_ns, step.end_ns)) for step in trace.steps)


def test_a_model_that_is_copied_while_it_is_recorded(tmp_path: Path) -> None:
    """A moving average or a checkpoint of the model must work, and keep nothing of the recording."""
    recorder = StepRecorder(0, RecordSettings(str(tmp_path), after=1, steps=1), StepMemory())
    recorder.install(torch)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copies = []
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        copies.append(copy.deepcopy(model))
        pickle.dumps(model)
    recorder.finish()
    assert any(len(each._forward_hooks) for each in copies)
    for each in copies:
        assert torch.equal(each(torch.ones(2, 4)), each[0](torch.ones(2, 4)))
    assert [step.number for step in read_traces([tmp_path])[0].steps] == [3]


def pass_around(world: Any, folder: str) -> None:
    """Train, and pass a message to the next rank in each step."""
    recorder = StepRecorder(world.rank, RecordSettings(folder, after=1, steps=2), StepMemory())
    recorder.install(torch)
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    to, of = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    for _ in range(5):
        weight.sum().backward()
        sending = torch.distributed.isend(torch.ones(100), to)
        torch.distributed.recv(torch.empty(100), of)
        sending.wait()
        optimizer.step()
    recorder.finish()


def test_messages_are_matched_with_nobodys(ranks: Any, tmp_path: Path) -> None:
    ranks.run(pass_around, nproc=3, args=(str(tmp_path),))
    traces = read_traces([tmp_path])
    for trace in traces:
        assert {(part.operation, part.num_bytes) for part in trace.collectives} == {
            ("send", 400),
            ("recv", 400),
        }
    profile = analyse(traces)
    assert profile.num_matched == profile.num_unmatched == 0
    assert profile.blames == ()


def train_badly(world: Any, folder: str) -> None:
    """Load in the loop, and search for unused parameters."""
    recorder = StepRecorder(world.rank, RecordSettings(folder, after=1, steps=4), StepMemory())
    recorder.install(torch)
    batches = iter(DataLoader(Numbers(0.05), batch_size=4))
    layers = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 1))
    model = DistributedDataParallel(layers, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(7):
        for _ in range(2):
            model(next(batches)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    recorder.finish()


def test_loading_in_the_loop_is_found(ranks: Any, tmp_path: Path) -> None:
    ranks.run(train_badly, nproc=2, args=(str(tmp_path),))
    traces = read_traces([tmp_path])
    for trace in traces:
        assert trace.is_loader_inline
    found = {each.code: each for each in judge_profile(analyse(traces))}
    assert found["PL917"].where == "ranks 0 and 1"
    assert "find_unused_parameters=False" in found["PL920"].fix
    assert analyse(traces).needless.backwards == 2


class SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.06)
        return gradient


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.04)
        return SlowGradient.apply(x)


def train_annotated(world: Any, folder: str) -> list[dict[str, float]]:
    """Train under torch's profiler, with annotations; return each phase's time by a clock of its own."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), Slow(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    times = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(4):
            with torch.profiler.record_function("step"):
                marks = [time.perf_counter()]
                with torch.profiler.record_function("backward"):  # wrong on purpose
                    loss = model(torch.randn(4, 16)).mean()
                time.sleep(0.05 * world.rank)  # the gap before a backward is the loss
                marks.append(time.perf_counter())
                loss.backward()
                marks.append(time.perf_counter())
                time.sleep(0.03)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                marks.append(time.perf_counter())
            names = (FORWARD, BACKWARD, OPTIMIZER)
            times.append({name: (b - a) * 1e9 for name, a, b in zip(names, marks, marks[1:], strict=False)})
            time.sleep(0.02)
    profiler.export_chrome_trace(f"{folder}/rank-{world.rank}.json")
    return times[1:]


_TRIES = 4


def test_foreign_traces_agree_with_the_scripts_clock(ranks: Any, tmp_path: Path) -> None:
    """In one of some tries, as other tests may take the cores in the middle of a phase."""
    for number in range(_TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        own = ranks.run(train_annotated, nproc=2, args=(str(folder),))
        try:
            check_phases(analyse(read_traces([folder])), own)
        except AssertionError:
            if number == _TRIES - 1:
                raise
        else:
            return


def check_phases(profile: Any, own: list[Any]) -> None:
    for rank in (0, 1):
        rows = [row for row in profile.rows if row.rank == rank][-3:]
        for name in (FORWARD, BACKWARD, OPTIMIZER):
            expected = sum(times[name] for times in own[rank]) / 3
            assert sum(row.phases[name] for row in rows) / 3 == pytest.approx(expected, rel=0.1, abs=2e6), (
                name
            )
        exposed = sum(row.exposed_ns for row in rows) / 3
        # Rank 0 is 50 ms ahead, which it spends waiting for the gradients.
        assert exposed == pytest.approx(0.05e9, abs=0.02e9) if rank == 0 else exposed < 0.02e9
        computed = sum(row.compute_ns for row in rows) / 3
        assert computed == pytest.approx(0.13e9 + 0.05e9 * rank, rel=0.15)
    (blame,) = profile.blames
    assert (blame.rank, blame.phase) == (1, FORWARD)
