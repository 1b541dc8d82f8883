"""The interval between states in memory: as often as they cost less than the share of the step time."""

from __future__ import annotations

import random

import pytest

from paceline.train.state import memory_interval
from paceline.train.state.memory_interval import MemoryInterval


@pytest.mark.parametrize(
    ("cost_s", "stall_s", "noise", "expected"),
    [
        (0.0, 0.0, 0.0, 1),
        (0.0005, 0.0005, 0.0, 1),
        (0.005, 0.001, 0.0, 5),
        (0.005, 0.001, 0.1, 5),
        (0.1999, 0.1999, 0.0, 200),
    ],
)
def test_states_cost_less_than_one_percent(
    monkeypatch: pytest.MonkeyPatch, cost_s: float, stall_s: float, noise: float, expected: int
) -> None:
    clock = 0.0
    monkeypatch.setattr(memory_interval.time, "perf_counter", lambda: clock)
    draw = random.Random(0)
    interval = MemoryInterval()
    states: list[int] = []
    extra_s = 0.0
    for step in range(1, 2001):
        clock += 0.1 * (1 + draw.uniform(-noise, noise) / 10) + extra_s
        interval.end_step(is_busy=False)
        extra_s = 0.0
        if interval.is_due(step, 0.01):
            costs = interval.read_costs()
            interval.begin(step, [costs, costs])
            interval.add_stall(stall_s)
            states.append(step)
            # The first one reserves memory.
            extra_s = cost_s if len(states) > 1 else 3.0
    assert interval.steps is not None
    assert abs(interval.steps - expected) <= noise * 20
    spent_s = cost_s * len([step for step in states if step > 100])
    assert spent_s <= 0.01 * 190 * (1 + noise)
    if expected == 200:
        assert "every 200 steps" in interval.describe_change()
        assert interval.describe_change() == "", "told once"


def test_the_slowest_rank_counts() -> None:
    interval = MemoryInterval()
    assert not interval.is_due(1, 0.01)
    interval.begin(5, [(0.001, 0.1), (0.004, 0.1)])
    assert interval.steps == 4
    interval.begin(9, [(0.001, 0.1), None])
    assert interval.steps == 4, "a rank that has not measured yet"
