from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.bench import scaling
from paceline.bench.rank.timing import WHOLE, RankTimes, TimeSettings
from paceline.bench.scaling import (
    COMPUTING,
    WIRE,
    Scaling,
    ScalingPoint,
    _check_one_device,
    find_excess,
    list_ranks,
    measure_scaling,
    summarise,
)
from paceline.bench.spread import Spread
from paceline.bench.starts import Measured, Run, adapt_recipe
from paceline.cli.bench_report import describe_scaling, judge_scaling
from paceline.errors import PacelineError
from paceline.place import usable_cores
from paceline.recipe.layout import Layout
from paceline.recipe.schema import LayoutSection
from tests.bench.recipes import tiny_recipe


def run_of(num_ranks: int, step_s: float, samples: float = 8.0, device: str = "cpu") -> Run:
    times = RankTimes({WHOLE: [step_s]}, {WHOLE: [step_s]}, {WHOLE: [samples]}, device=device)
    return Run([times] * num_ranks, None)


def test_lists_powers_of_two_and_the_most() -> None:
    assert list_ranks(1) == [1]
    assert list_ranks(4) == [1, 2, 4]
    assert list_ranks(6) == [1, 2, 4, 6]
    with pytest.raises(PacelineError, match="nproc=0"):
        list_ranks(0)


def test_every_number_of_ranks_has_its_turn_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[int, int]] = []

    def run(job: Measured, num_ranks: int, threads: int, settings: TimeSettings, grow: int = 1) -> Run:
        order.append((num_ranks, grow))
        return run_of(num_ranks, 0.1)

    monkeypatch.setattr(Measured, "run", run)
    monkeypatch.setattr(scaling, "check_launch", lambda *args: None)
    found = measure_scaling(Measured(words=("train.py",)), [4, 1, 2], steps=1, repeats=2, weak=True)
    assert order == [(1, 1), (2, 2), (4, 4), (4, 4), (2, 2), (1, 1)]
    assert [point.samples_per_step for point in found.points] == [8, 16, 32]
    assert [point.efficiency.median for point in found.points] == [1.0, 1.0, 1.0]
    assert found.is_weak


def test_speedup_is_taken_within_a_round() -> None:
    first = [run_of(1, step_s) for step_s in (1.0, 10.0, 2.5)]  # the machine slows down
    runs = [run_of(2, times.step_s()[0] / 2, 4.0) for times in first]
    point = summarise(2, runs, 1, first)
    assert (point.speedup.low, point.speedup.median, point.speedup.high) == (2.0, 2.0, 2.0)


def point_of(num_ranks: int, efficiency: Spread, samples: float, **more: Any) -> ScalingPoint:
    rate = Spread.of([num_ranks * efficiency.median])
    values = {"parts_s": {}, "comm_bytes": 0, "num_calls": 0, **more}
    return ScalingPoint(num_ranks, samples, rate, rate, efficiency, 0.1, **values)


def say(efficiency: Spread, parts: dict[str, float], num_bytes: int = 0) -> str:
    first = point_of(1, Spread.of([1.0]), 8, parts_s={WIRE: 0.0, "waiting": 0.0, COMPUTING: 1.0})
    parts = {"waiting": 0.0, **parts} if parts else {}
    last = point_of(2, efficiency, 16, parts_s=parts, comm_bytes=num_bytes, num_calls=2)
    found = Scaling([first, last], True, 5, "cpu", 1, 2, 10, 3, 6)
    assert "samples of a step grow with the ranks, from 8 samples" in describe_scaling(found)
    return " ".join(judge_scaling(found))


def test_the_verdict_says_above_or_below_and_why() -> None:
    good, poor = Spread.of([0.93] * 6), Spread.of([0.5] * 6)
    assert "93% of 2 times the throughput of 1: above 80%." in say(good, {WIRE: 0.05, COMPUTING: 1.0})
    said = say(poor, {WIRE: 1.0, COMPUTING: 1.0}, 200 << 20)
    assert "below 80%" in said
    assert "bandwidth (200.0 MiB in 2 collectives per step" in said
    assert "too little work per collective" in say(poor, {WIRE: 1.0, COMPUTING: 1.0}, 8192)
    assert "computation itself" in say(poor, {WIRE: 0.1, COMPUTING: 2.0})
    assert "less than half as much" in say(poor, {WIRE: 0.02, COMPUTING: 1.0})
    assert "around 80%" in say(Spread.of([0.75, 0.8, 0.84]), {})
    assert "No information: efficiency of 95% (70%..130%)" in say(Spread.of([0.7, 0.95, 1.3]), {})
    wide_but_poor = say(Spread.of([0.3, 0.5, 0.6]), {})
    assert "below 80%" in wide_but_poor, "a wide interval below is below"


def test_the_same_samples_are_compared_when_they_are_shared_out() -> None:
    first = point_of(1, Spread.of([1.0]), 8, parts_s={COMPUTING: 1.0})
    last = point_of(2, Spread.of([1.0]), 8, parts_s={COMPUTING: 0.5})
    assert find_excess(first, last) == {COMPUTING: 0.0}


def test_adapted_recipe_ends_by_steps_on_any_ranks_with_the_same_threads(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    adapted = adapt_recipe(recipe, threads=3, num_steps=7, grow=2, layout=Layout(dp_replicate=2))
    assert (adapted.train.steps, adapted.train.epochs, adapted.checkpoint.every) == (7, None, 0)
    assert (adapted.train.global_batch_size, adapted.train.threads_per_rank) == (12, 3)
    assert adapted.layout == LayoutSection(dp_replicate=2)
    assert Measured(recipe=recipe).choose_threads(64) == 1
    assert Measured(words=("train.py",)).choose_threads(1) == usable_cores()
    assert Measured(words=("train.py",)).choose_threads(10_000) == 1


def test_refuses_numbers_below_one(tmp_path: Path) -> None:
    job = Measured(recipe=tiny_recipe(tmp_path))
    for bad in ({"steps": 0}, {"repeats": -1}):
        with pytest.raises(PacelineError, match=r"=(0|-1)\. .*PL620"):
            measure_scaling(job, [1], **bad)
    with pytest.raises(PacelineError, match="PL620"):
        measure_scaling(job, [1, 0])


def test_refuses_to_compare_cuda_with_cpu() -> None:
    runs = {1: [run_of(1, 1.0, device="cuda")], 2: [run_of(2, 1.0)]}
    with pytest.raises(PacelineError, match=r"1 ranks on cuda, 2 ranks on cpu\..*PL621"):
        _check_one_device(runs)
