"""Recording a job that already runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.launching.rank.requests import FIRST, REQUEST, RequestReader, read_table, write_whole
from paceline.memory.steps import STEPS, StepMemory
from paceline.profiling.rank import asked
from paceline.profiling.rank.recorder import RecordSettings, StepRecorder
from paceline.profiling.rank.recording import count_steps_that_fit
from paceline.profiling.read import read_traces
from paceline.profiling.running import RunningJob, find_job
from paceline.torch_seams.watching import BUFFER_SIZES

SCRIPT = """
import os, time, torch
from torch import nn
torch.distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
# A hook after those of the watch: it must not be skipped or disturbed.
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: None)
while True:
    found = torch.tensor(float(os.path.exists("enough")))
    torch.distributed.all_reduce(found)
    if found:
        break
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if torch.distributed.get_rank():
        time.sleep(0.05)
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", "2", "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    found = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, env=environment)
    try:
        yield found
    finally:
        (tmp_path / "enough").touch()
        try:
            found.wait(60)
        finally:
            found.kill()
            found.communicate()


def profile(pid: int, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "profile", "--pid", str(pid), "--json", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, cwd=folder)


def wait_for(job: subprocess.Popen[str]) -> None:
    """Wait until a job has a launcher's folder."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert job.poll() is None, job.communicate()
        try:
            find_job(job.pid)
        except PacelineError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("it does not start")


@pytest.mark.slow
def test_a_running_job_is_recorded(job: subprocess.Popen[str], tmp_path: Path) -> None:
    """Rank 1 is late; the job goes on, and ends as it would have."""
    wait_for(job)
    done = profile(job.pid, tmp_path, "--out", "traces", "--steps", "4")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["ranks"] == [0, 1]
    first = report["steps"][0]
    assert report["steps"] == [first, first + 1, first + 2, first + 3]
    assert f"recording starts with step {first}" in done.stderr
    assert report["num_unmatched"] == 0
    assert [(blame["rank"], blame["phase"]) for blame in report["blames"]] == [(1, "host")]
    late = profile(job.pid, tmp_path, "--out", "late", "--from", "3")
    assert late.returncode == 2
    assert "had ended step 1 already" in late.stdout
    assert "PL916" in late.stdout
    assert not (tmp_path / "late").exists()
    (tmp_path / "enough").touch()
    assert job.wait(120) == 0
    _, errors = job.communicate()
    assert "Error" not in errors, errors


@pytest.mark.parametrize(
    ("pid", "reason"),
    [(4_000_000_000, "no process has this number"), (os.getpid(), "is a launcher that watches its ranks")],
)
def test_a_process_without_a_job_is_one_message(
    pid: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--pid", str(pid)]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert "[PL915]" in error
    assert list(tmp_path.iterdir()) == []


def test_flags_are_checked_before_the_job_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["--steps", "0"], ["--from", "2"]):
        assert main(["profile", "--pid", "1", *words]) == 2
        assert "[PL905]" in capsys.readouterr().err


def test_a_rank_records_from_the_step_that_was_chosen(tmp_path: Path) -> None:
    """The first request is taken back, a second one comes too late, and the third one is carried out."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = asdict(RecordSettings(str(tmp_path / "traces"), 1, 2))

    def ask(name: str, first: int) -> tuple[str, int]:
        asked.answer(0, tmp_path, {"name": name, "first": first, "settings": settings})
        table = read_table(tmp_path / asked.name_answer(0))
        assert table is not None
        assert (table["request"], table["reason"]) == (name, "")
        return table["state"], table["count"]

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    STEPS.install(torch)
    hook = register_optimizer_step_post_hook(lambda *_: None)  # after that of `STEPS`
    try:
        state, count = ask("first", 0)
        assert state == asked.COUNTING
        assert ask("first", count + 4) == (asked.AHEAD, count)
        step()
        step()
        assert ask("second", count + 3) == (asked.TOO_LATE, count + 2)
        step()
        assert ask("third", count + 6) == (asked.AHEAD, count + 3)
        for _ in range(6):
            step()
        assert ask("third", count + 6) == (asked.DONE, count + 9)
    finally:
        hook.remove()
        STEPS.remove()
    (trace,) = read_traces([tmp_path / "traces"])
    assert [step.number for step in trace.steps] == [count + 6, count + 7]
    assert torch.autograd._profiler_enabled() is False


class Ranks:
    """Ranks that answer as those of a job do, each by a function from what is asked to a state."""

    def __init__(self, folder: Path, counts: list[int], **facts: Any) -> None:
        self.folder, self.counts, self.facts = folder, counts, facts
        self.asked: list[int] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def __enter__(self) -> Ranks:
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()

    def run(self) -> None:
        while not self.over.wait(0.05):
            table = read_table(self.folder / REQUEST)
            if table is None:
                continue
            if table["first"] and table["first"] not in self.asked:
                self.asked.append(table["first"])
            for rank, count in enumerate(self.counts):
                self.counts[rank] += 1
                state = asked.COUNTING
                if table["first"]:
                    state = self.facts.get("state", asked.DONE)
                    if len(self.asked) == 1 and rank == self.facts.get("late"):
                        state = asked.TOO_LATE
                write_whole(
                    self.folder / asked.name_answer(rank),
                    {
                        "request": table["name"],
                        "rank": rank,
                        "state": state,
                        "reason": "OSError: no space",
                        "count": count,
                        "time_s": time.monotonic(),
                        "ranks": len(self.counts),
                        "world_size": self.facts.get("world_size", len(self.counts)),
                    },
                )


SETTINGS = RecordSettings("traces", 1, 4)


def test_a_step_ahead_of_all_ranks_is_chosen_and_a_later_one_if_that_was_too_late(tmp_path: Path) -> None:
    said: list[str] = []
    with Ranks(tmp_path, [100, 140], late=1) as ranks:
        RunningJob(tmp_path, SETTINGS, said.append).record(None)
    assert len(ranks.asked) == 2
    assert 140 < ranks.asked[0] < ranks.asked[1]
    assert said == [f"recording starts with step {step}" for step in ranks.asked]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("facts", "first", "message"),
    [
        ({"late": 0}, 90, r"rank 0 had ended step 88 already.*\[PL916\]"),
        ({"state": asked.FAILED}, None, r"rank . could not record: OSError: no space.*\[PL916\]"),
        ({"world_size": 4}, None, r"ranks on other nodes.*--from STEP on each node.*\[PL916\]"),
    ],
)
def test_ranks_that_cannot_record_are_one_message(
    facts: dict[str, Any], first: int | None, message: str, tmp_path: Path
) -> None:
    with Ranks(tmp_path, [100, 101], **facts), pytest.raises(PacelineError, match=message):
        RunningJob(tmp_path, SETTINGS, print).record(first)
    assert not (tmp_path / REQUEST).exists()


@pytest.mark.parametrize("name", [FIRST, REQUEST])
def test_one_recording_at_a_time(name: str, tmp_path: Path) -> None:
    write_whole(tmp_path / name, {"asker": os.getpid()})
    with pytest.raises(PacelineError, match=rf"process {os.getpid()} is recording the job already"):
        RunningJob(tmp_path, SETTINGS, print).record(None)


@pytest.mark.parametrize(
    ("size", "num_calls", "num_steps"),
    [("1000", 30, 32), ("1000", 600, 1), ("1000", 0, sys.maxsize), ("many", 30, sys.maxsize)],
)
def test_steps_with_more_collectives_than_torch_keeps_are_not_recorded(
    size: str, num_calls: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in BUFFER_SIZES:
        monkeypatch.delenv(name, raising=False)
    assert count_steps_that_fit(num_calls) == sys.maxsize
    monkeypatch.setenv(BUFFER_SIZES[0], size)
    assert count_steps_that_fit(num_calls) == num_steps


def test_a_request_that_is_nonsense_does_nothing(tmp_path: Path) -> None:
    reader = RequestReader(0, tmp_path)
    reader.look()
    for text in ("{", "[]", "{}", '{"entry": "paceline.nothing:nothing"}'):
        (tmp_path / REQUEST).write_text(text)
        reader.look()
    assert sorted(path.name for path in tmp_path.iterdir()) == [REQUEST]


@pytest.mark.parametrize("size", [None, "4k"], ids=["torch only logs", "tmpfs"])
def test_a_full_disk_leaves_no_part_of_a_trace(
    size: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch writes into a file of its own, and only logs that it could not. The training goes on."""

    def export(profiler: Any, path: str) -> None:
        Path(f"{path}.tmp").write_text("{")

    folder = tmp_path / "traces"
    folder.mkdir()
    if size is None:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    else:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting a tmpfs is not allowed here")
    try:
        recorder = StepRecorder(0, RecordSettings(str(folder), after=1, steps=20), StepMemory())
        recorder.install(torch)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(24):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        recorder.finish()
        assert "torch cannot write to" in recorder.failure
        assert "left" in recorder.failure
        assert [path.name for path in folder.iterdir()] in ([], ["rank-0.failed"])
    finally:
        if size is not None:
            # Lazily: torch keeps its file open.
            subprocess.run(["umount", "-l", str(folder)], check=True)
    (record,) = caplog.records
    assert record.getMessage().startswith("rank 0 records no trace: OSError: torch cannot write to")
    assert record.getMessage().endswith("[PL924]")
