"""The lines that a run prints while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import progress
from paceline.sinks.sink import SinkRun
from paceline.train.step import Step
from paceline.train.update import Updated


def test_both_kinds_of_lines_have_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    printer, sink = progress.ProgressPrinter(), progress.ProgressSink()
    sink.begin(SinkRun(Path("."), num_steps=5))
    for number in range(1, 6):
        done = Updated(2.0, 8.0, 1.0, None, 0, 0.0)
        step = Step(number, 0, 8, 0.1, {"model": done}, step_s=30.0, data_s=0.0, comm_s=0.0)
        printer.step(step, 5, None)
        sink.step(number, {"loss": 2.0, "samples_per_s": 8 / 30}, clock[0])
        clock[0] += 30.0
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("/s")[2] for line in lines] == [
        *("", ""),
        *(["  1 min 30 s left"] * 2),
        *(["  1 min 0 s left"] * 2),
        *(["  30.0 s left"] * 2),
        *("", ""),
    ]
