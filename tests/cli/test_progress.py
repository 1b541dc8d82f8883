"""The lines that a run prints while it trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from paceline.cli import progress
from paceline.recipe import Layout
from paceline.sinks.sink import SinkRun
from paceline.train.step import Step
from paceline.train.update import Updated
from paceline.world import World


def test_both_kinds_of_lines_have_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    printer, sink = progress.ProgressPrinter(), progress.ProgressSink()
    layout = Layout(dp_replicate=2)
    world = cast(World, SimpleNamespace(world_size=2, device=torch.device("cpu")))
    printer.begin(num_parameters=1000, num_steps=5, first_step=0, world=world, layout=layout)
    assert "on 2 ranks (cpu), 5 steps" in capsys.readouterr().err
    sink.begin(SinkRun(Path("."), num_steps=5))
    for number in range(1, 6):
        done = Updated(2.0, 8.0, 1.0, None, 0, 0.0)
        step = Step(number, 0, 8, 0.1, {"model": done}, step_s=30.0, data_s=0.0, comm_s=0.0)
        printer.step(step, 5, None)
        values = {"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr, "samples_per_s": 8 / 30}
        sink.step(number, values, clock[0])
        clock[0] += 30.0
    lines = capsys.readouterr().err.splitlines()
    assert lines[::2] == lines[1::2]
    assert [line.rpartition("/s")[2] for line in lines] == [
        *("", ""),
        *(["  1 min 30 s left"] * 2),
        *(["  1 min 0 s left"] * 2),
        *(["  30.0 s left"] * 2),
        *("", ""),
    ]
