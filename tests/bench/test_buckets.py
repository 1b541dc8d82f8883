"""Sizes of buckets tried in turn."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.bench.buckets import _BucketTimes, _summarise, check_sizes, keep_distinct, measure_buckets
from paceline.bench.ranks import adapt_recipe
from paceline.cli.bench_report import describe_buckets
from paceline.errors import PacelineError
from tests.bench.recipes import tiny_recipe


@pytest.mark.slow
def test_measures_real_ranks_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path, "train.global_batch_size=8")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    found = measure_buckets(recipe, 2, (0.001, 50.0), steps=1, repeats=3)
    assert list(work.iterdir()) == []
    # 25 MiB is the recipe's own; the one of 50 would hold all gradients as well.
    assert [size.mib for size in found.sizes] == [0.001, 25.0]
    assert all(size.step_s.num_values == size.ratio.num_values == 3 for size in found.sizes)
    json.dumps(asdict(found))


def summarise(folder: Path, *blocks: dict[float, list[float]]) -> str:
    recipe = adapt_recipe(tiny_recipe(folder), threads=1, num_steps=10)
    times = [_BucketTimes(each, "cpu", 100, 60 << 20) for each in blocks]
    return describe_buckets(_summarise(times, recipe, 1))


def test_the_best_size_is_told_with_its_interval(tmp_path: Path) -> None:
    own, half = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [0.5, 1.0, 0.5, 1.0, 0.5, 1.0]
    late = {5.0: [1.2] * 6, 25.0: own, 100.0: half}
    out = summarise(tmp_path, late, {**late, 5.0: [2.4] * 6})
    assert "best: ddp.bucket_cap_mb = 100, 0.500 of 25 MiB" in out
    lines = {line.split()[0]: line for line in out.splitlines() if " MiB " in line}
    assert "2400 ms" in lines["5"], "a block takes as long as its slowest rank"
    assert lines["100"].endswith("one bucket holds all")
    assert not lines["25"].endswith("one bucket holds all")


def test_noise_is_not_called_better(tmp_path: Path) -> None:
    blocks = {25.0: [1.0] * 6, 50.0: [0.9, 1.1, 0.9, 1.1, 0.9, 0.9]}
    out = summarise(tmp_path, blocks)
    assert "no size is faster than 25 MiB beyond the noise" in out


def test_sizes_that_hold_everything_are_one() -> None:
    assert keep_distinct([1, 5, 10, 25, 50], own=25, gradient_bytes=8 << 20) == [1, 5, 10, 25]
    assert keep_distinct([1, 5], own=5, gradient_bytes=80 << 20) == [1, 5]


@pytest.mark.parametrize("sizes", [[], [0.0], [5.0, -1.0], [float("nan")], [float("inf")]])
def test_sizes_that_are_none_are_refused(sizes: list[float]) -> None:
    with pytest.raises(PacelineError, match="PL965"):
        check_sizes(sizes)
