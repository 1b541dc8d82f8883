"""The exact reduction against the fast one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.bench.ranks import adapt_recipe
from paceline.bench.reduction import _ReductionTimes, _summarise, measure_reduction
from tests.bench.recipes import tiny_recipe


def test_measures_real_ranks_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path, "train.global_batch_size=8")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    found = measure_reduction(recipe, 2, steps=1, repeats=4)
    assert list(work.iterdir()) == []
    assert (found.num_ranks, found.num_steps, found.num_repeats, found.device) == (2, 1, 4, "cpu")
    assert found.fast_s.num_values == found.exact_s.num_values == found.ratio.num_values == 4
    assert 0.01 < found.ratio.median < 100
    assert found.gradient_bytes == 4 * found.num_parameters
    assert found.network_bytes == found.ring_bytes == found.gradient_bytes
    json.dumps(asdict(found))


def test_a_block_takes_as_long_as_its_slowest_rank(tmp_path: Path) -> None:
    recipe = adapt_recipe(tiny_recipe(tmp_path), threads=1, num_steps=10)
    found = [
        _ReductionTimes({"fast": [1.0, 2.0], "exact": [1.0, 3.0]}, "cpu", 100, 400, (2, 1, 1, 1)),
        _ReductionTimes({"fast": [0.5, 2.0], "exact": [1.5, 2.0]}, "cpu", 100, 400, (2, 1, 1, 1)),
    ] * 2
    reduction = _summarise(found, recipe, 1)
    assert (reduction.ratio.low, reduction.ratio.high) == pytest.approx((1.5, 1.5))
    assert reduction.fast_s.median == pytest.approx(1.5)
    # Five microbatches on four ranks are a node each: 2 (W - 1) / W of 400 bytes.
    assert reduction.network_bytes == reduction.ring_bytes == 600
