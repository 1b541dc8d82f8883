from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.bench.starts import adapt_recipe
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
