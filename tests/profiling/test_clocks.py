"""Clocks of two machines that differ: the recording recovers by how much, within the bound that it states."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.memory.steps import StepMemory
from paceline.profiling.matching import match_collectives
from paceline.profiling.rank import loop_phases, recorder, recording, sampler
from paceline.profiling.rank.recorder import RecordSettings, StepRecorder
from paceline.profiling.read import read_traces

DRIFT = 50e-6


def train_apart(world: Any, folder: str, ahead_ns: int) -> int:
    """Record a training whose rank 1 is on another machine, as far as it can see, with another clock.

    Returns the instant at which that clock is ahead by exactly `ahead_ns`; it drifts from there.
    """
    origin = time.time_ns()

    def now() -> int:
        real = time.time_ns()
        return real + ahead_ns + round(DRIFT * (real - origin)) if world.rank else real

    read = recording.read_entries
    moved = SimpleNamespace(**{**vars(time), "time_ns": now})
    shift = ahead_ns if world.rank else 0
    modules = (loop_phases, recorder, recording, sampler)
    patches = [patch.object(module, "time", moved) for module in modules]
    patches.append(patch.object(recorder, "_read_host", lambda: f"machine {world.rank}"))
    patches.append(
        patch.object(
            recording,
            "read_entries",
            lambda **which: [replace(call, created_ns=call.created_ns + shift) for call in read(**which)],
        )
    )
    for each in patches:
        each.start()
    try:
        own = StepRecorder(world.rank, RecordSettings(folder, after=1, steps=4), StepMemory())
        own.install(torch)
        model = DistributedDataParallel(nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for _ in range(7):
            model(torch.ones(4, 16)).mean().backward()
            optimizer.step()
        own.finish()
        return origin
    finally:
        for each in patches:
            each.stop()


@pytest.mark.parametrize("ahead_ns", [5_000_000, 2_000_000_000], ids=["5 ms", "2 s"])
def test_a_planted_offset_is_recovered(ranks: Any, tmp_path: Path, ahead_ns: int) -> None:
    _, origin = ranks.run(train_apart, nproc=2, args=(str(tmp_path), ahead_ns))
    path = tmp_path / "rank-0001.json"
    table = json.loads(path.read_text())
    table["baseTimeNanoseconds"] += ahead_ns  # the profiler's clock is the machine's
    path.write_text(json.dumps(table))
    table = table["paceline"]
    first, other = read_traces([tmp_path])
    assert first.clock_error_ns == 0
    assert 0 < other.clock_error_ns < 100_000_000
    for step, (_, begin, _) in zip(other.steps, table["steps"], strict=True):
        real = origin + (begin - ahead_ns - origin) / (1 + DRIFT)
        assert abs(step.begin_ns - real) <= other.clock_error_ns + 2  # rounded to nanoseconds
    matched, _ = match_collectives([first, other])
    assert len(matched) >= 4
    for collective in matched:
        earliest = min(part.end_ns for part in collective.parts.values())
        assert earliest >= collective.arrived_ns - other.clock_error_ns - 200_000
