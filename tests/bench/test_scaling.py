from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.bench import scaling
from paceline.bench.ranks import NUM_WARM_UP, adapt_recipe, choose_threads
from paceline.bench.scaling import _check_one_device, _ScalingRun, _summarise, list_ranks, measure_scaling
from paceline.errors import PacelineError
from paceline.place import usable_cores
from paceline.recipe.schema import LayoutSection
from tests.bench.recipes import tiny_recipe


def test_lists_powers_of_two_and_the_most() -> None:
    assert list_ranks(1) == [1]
    assert list_ranks(4) == [1, 2, 4]
    assert list_ranks(6) == [1, 2, 4, 6]
    with pytest.raises(PacelineError, match="nproc=0"):
        list_ranks(0)


def test_measures_real_ranks_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    found = measure_scaling(recipe, [2, 1], steps=2, repeats=1)
    assert list(work.iterdir()) == []
    one, two = found.points
    assert [one.num_ranks, two.num_ranks] == [1, 2]
    assert one.speedup.median == one.efficiency.median == 1.0
    assert two.speedup.median == pytest.approx(two.samples_per_s.median / one.samples_per_s.median)
    assert two.efficiency.median == pytest.approx(two.speedup.median / 2)
    assert two.tokens_per_s is not None
    assert two.tokens_per_s.median == pytest.approx(16 * two.samples_per_s.median)
    assert one.global_batch_size == two.global_batch_size == 6
    assert one.step_s == pytest.approx(6 / one.samples_per_s.median)
    assert 0 < two.comm_share < 1
    assert (found.device, found.threads_per_rank, found.num_warm_up) == ("cpu", 1, NUM_WARM_UP)
    json.dumps(asdict(found))


def test_weak_scaling_grows_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[int, list[int]] = {}

    def launch(fn: object, nproc: int, args: tuple[object, ...], **settings: object) -> list[_ScalingRun]:
        sizes.setdefault(nproc, []).append(args[0].train.global_batch_size)  # type: ignore[attr-defined]
        return [_ScalingRun(100.0 * nproc, None, 0.1, 0.0, "cpu", 5)] * nproc

    monkeypatch.setattr(scaling, "launch", launch)
    found = measure_scaling(tiny_recipe(tmp_path), [1, 2, 4], steps=1, repeats=2, weak=True)
    assert sizes == {1: [6, 6], 2: [12, 12], 4: [24, 24]}
    assert [point.global_batch_size for point in found.points] == [6, 12, 24]
    assert [point.efficiency.median for point in found.points] == [1.0, 1.0, 1.0]
    assert [point.best_efficiency for point in found.points] == [1.0, 1.0, 1.0]


def test_speedup_is_taken_within_a_round(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    first = [
        _ScalingRun(rate, None, 1.0, 0.0, "cpu", 5) for rate in (10.0, 1.0, 4.0)
    ]  # the machine slows down
    runs = [_ScalingRun(2 * run.samples_per_s, None, 1.0, 0.0, "cpu", 5) for run in first]
    point = _summarise(2, runs, 1, first, recipe, weak=False)
    assert (point.speedup.low, point.speedup.median, point.speedup.high) == (2.0, 2.0, 2.0)
    # 3 microbatches on 2 ranks: one computes 4 samples, the other 2.
    assert point.best_efficiency == 0.75


def test_adapted_recipe_ends_by_steps_on_any_ranks_with_the_same_threads(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    adapted = adapt_recipe(recipe, threads=3, num_steps=7, grow=2)
    assert (adapted.train.steps, adapted.train.epochs) == (7, None)
    assert (adapted.train.global_batch_size, adapted.train.threads_per_rank) == (12, 3)
    assert adapted.layout == LayoutSection()
    assert choose_threads(recipe, 64) == 1
    auto = tiny_recipe(tmp_path, "train.threads_per_rank=auto")
    assert choose_threads(auto, 1) == usable_cores()
    assert choose_threads(auto, 10_000) == 1


def test_refuses_numbers_below_one(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    for bad in ({"steps": 0}, {"repeats": -1}):
        with pytest.raises(PacelineError, match=r"=(0|-1)\. .*PL620"):
            measure_scaling(recipe, [1], **bad)
    with pytest.raises(PacelineError, match="PL620"):
        measure_scaling(recipe, [1, 0])


def test_refuses_to_compare_cuda_with_cpu() -> None:
    runs = {1: [_ScalingRun(1.0, None, 1.0, 0.0, "cuda", 5)], 2: [_ScalingRun(1.0, None, 1.0, 0.0, "cpu", 5)]}
    with pytest.raises(PacelineError, match=r"1 ranks on cuda, 2 ranks on cpu\..*PL621"):
        _check_one_device(runs)
