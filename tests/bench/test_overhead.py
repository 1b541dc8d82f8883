from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.bench.overhead import _OverheadTimes, _summarise, measure_overhead
from paceline.bench.ranks import adapt_recipe
from paceline.data import build_data
from paceline.errors import PacelineError
from paceline.recipe import Recipe
from paceline.train.run import build_loader, build_trainer
from tests.bench.recipes import tiny_recipe
from tests.dist.pool import Pool


@contextmanager
def count_all_reduces() -> Iterator[list[int]]:
    real, sizes = dist.all_reduce, []

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield sizes
    finally:
        dist.all_reduce = real


def step_apart(world: Any, recipe: Recipe) -> dict[str, Any]:
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, 10)
    shares = iter(build_loader(recipe, trainer, data.train, train=True))
    trainer.step(next(shares))
    together = [p.detach().clone() for p in trainer.model.parameters()]
    with count_all_reduces() as silent, trainer.without_communication():
        trainer.step(next(shares))
    apart = [p.detach().clone() for p in trainer.model.parameters()]
    with count_all_reduces() as loud:
        trainer.step(next(shares))
    try:
        trainer.save()
        saved = "saved"
    except PacelineError as error:
        saved = error.code
    return {
        "silent": len(silent),
        "loud": len(loud),
        "together": sum(float(p.double().sum()) for p in together),
        "apart": sum(float(p.double().sum()) for p in apart),
        "saved": saved,
    }


def test_nothing_is_communicated_inside_and_all_outside(ranks: Pool, tmp_path: Path) -> None:
    recipe = adapt_recipe(tiny_recipe(tmp_path, "train.reduction=fast"), threads=1, num_steps=10)
    first, second = ranks.run(step_apart, nproc=2, args=(recipe,))
    assert first["silent"] == second["silent"] == 0
    assert first["loud"] == second["loud"] >= 1
    assert first["together"] == second["together"]
    assert first["apart"] != second["apart"]
    assert first["saved"] == second["saved"] == "PL433"


def test_measures_real_ranks_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    found = measure_overhead(recipe, 2, steps=1, repeats=4)
    assert list(work.iterdir()) == []
    assert (found.num_ranks, found.num_steps, found.num_repeats, found.device) == (2, 1, 4, "cpu")
    assert found.total_s.num_values == found.compute_s.num_values == found.comm_share.num_values == 4
    assert found.gradient_bytes == 4 * found.num_parameters
    assert found.compute_s.median > 0
    assert 0 < found.exposed_share < 1
    json.dumps(asdict(found))


def test_compute_is_that_of_the_slowest_rank(tmp_path: Path) -> None:
    recipe = adapt_recipe(tiny_recipe(tmp_path), threads=1, num_steps=10)
    found = [
        _OverheadTimes([10.0, 20.0], [8.0, 16.0], [1.0, 2.0], "cpu", 5, 20),
        _OverheadTimes([10.0, 20.0], [4.0, 8.0], [5.0, 10.0], "cpu", 5, 20),
    ]
    overhead = _summarise(found, recipe, 1)
    assert (overhead.comm_share.low, overhead.comm_share.high) == pytest.approx((0.2, 0.2))
    assert overhead.exposed_share == pytest.approx(0.3)
    assert overhead.imbalance == pytest.approx(0.25)


def test_refuses_one_rank_and_numbers_below_one(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(PacelineError, match="PL622"):
        measure_overhead(recipe, 1)
    with pytest.raises(PacelineError, match=r"steps=0\..*PL620"):
        measure_overhead(recipe, 2, steps=0)
