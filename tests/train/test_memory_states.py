"""`checkpoint.memory_every`: a number is a demand, and `"auto"` keeps states only where they are of use."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from paceline.errors import PacelineError
from paceline.recipe.schema import CheckpointSection
from paceline.train import memory_states
from paceline.train.memory_states import MAX_COST, MAX_MEMORY, MemoryStates

STARTS_AGAIN = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_MAX_RESTARTS": "3"}
STARTS_ONCE = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_MAX_RESTARTS": "0"}


class Run:
    """Steps of one rank that take a given time each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str]) -> None:
        self.clock = 0.0
        self.kept: list[tuple[int, Any, float]] = []
        self.error: PacelineError | None = None
        for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(memory_states.time, "monotonic", lambda: self.clock)

    def take(self, every: int | Literal["auto"], step_s: float, num_steps: int) -> list[int]:
        world: Any = SimpleNamespace(world_size=1, is_main=True, num_nodes=1)
        states = MemoryStates(world, every, self.keep)
        for step in range(1, num_steps + 1):
            self.clock += step_s
            self.step = step
            states.after(step)
        return [step for step, _, _ in self.kept]

    def keep(self, max_cost: float | None = None, max_memory: float = 1.0) -> bool:
        if self.error is not None:
            raise self.error
        self.kept.append((self.step, max_cost, max_memory))
        return True


def test_auto_is_the_default() -> None:
    assert CheckpointSection().memory_every == "auto"


@pytest.mark.parametrize("step_s", [0.03125, 0.75, 25.0, 100.0])
def test_auto_begins_after_a_minute(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    run = Run(monkeypatch, STARTS_AGAIN)
    kept = run.take("auto", step_s, 2000)
    assert kept[0] == max(4, next(step for step in range(1, 2000) if step * step_s >= 60))
    assert kept == list(range(kept[0], 2001)), "from then on the cost decides"
    assert run.kept[0][1:] == (MAX_COST, MAX_MEMORY)


@pytest.mark.parametrize("env", [{}, STARTS_ONCE, {"TORCHELASTIC_MAX_RESTARTS": "3"}])
def test_auto_keeps_nothing_that_nobody_would_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, env: dict[str, str]
) -> None:
    assert Run(monkeypatch, env).take("auto", 10.0, 50) == []
    assert caplog.text == ""


def test_a_number_is_kept_and_what_it_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert Run(monkeypatch, STARTS_AGAIN).take(5, 0.1, 20) == [5, 10, 15, 20]
    assert caplog.text == ""
    run = Run(monkeypatch, STARTS_ONCE)
    assert run.take(10, 0.1, 20) == [10, 20]
    assert run.kept[0][1:] == (None, 1.0), "neither cost nor memory bounds a demand"
    assert (
        "memory_every = 10: states in memory are used only if the launcher starts ranks again" in caplog.text
    )


@pytest.mark.parametrize("code", ["PL561", "PL562", "PL507"])
def test_what_makes_states_impossible_ends_only_a_run_that_demands_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    caplog.set_level(logging.WARNING)
    run = Run(monkeypatch, STARTS_AGAIN)
    run.error = PacelineError(code, saw="1 GiB is missing.", rule="It is needed.", fix="Get it.")
    with pytest.raises(PacelineError, match=code):
        run.take(1, 30.0, 9)
    if code == "PL507":
        with pytest.raises(PacelineError, match=code):
            run.take("auto", 30.0, 9)
        return
    assert run.take("auto", 30.0, 9) == []
    assert caplog.text.count("No states are kept in memory: 1 GiB is missing.") == 1, "told once"
