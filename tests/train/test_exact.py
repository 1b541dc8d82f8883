"""Exact reduction: the weights have the same bits on any number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.dist.pool import Pool
from tests.train.cases import Trained, digits_recipe, text_recipe, train_recipe_table

NUM_STEPS = 16
DTYPES = ["fp32", "bf16", "fp16", "fp64"]
SETTINGS = ["train.reduction=exact", "ddp.bucket_cap_mb=0.01"]


def first_steps(world: Any, table: dict[str, Any], settings: list[str], num_steps: int) -> list[Trained]:
    """Take the first steps in every dtype."""
    return [
        train_recipe_table(world, table, [*SETTINGS, *settings, f"train.dtype={dtype}"], num_steps)
        for dtype in DTYPES
    ]


def show(trained: Trained) -> tuple[Any, ...]:
    return (trained.hash, trained.losses, trained.grad_norms, trained.weights)


@pytest.fixture(scope="module")
def alone(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """By kind of model, its recipe and what one rank makes of it."""
    folder = tmp_path_factory.mktemp("recipes")

    @functools.cache
    def train(kind: str) -> Any:
        table = digits_recipe() if kind == "resnet" else text_recipe(folder / kind, kind)
        return table, ranks.run(first_steps, nproc=1, args=(table, [], NUM_STEPS))[0]

    return train


# More numbers of ranks, over more steps: benchmarks/same_bits.
@pytest.mark.parametrize(
    ("kind", "nproc"), [("gpt", 2), ("gpt", 3), ("gpt", 8), ("encoder", 3), ("resnet", 2), ("resnet", 8)]
)
def test_recipes_have_the_same_bits(ranks: Pool, alone: Callable[[str], Any], kind: str, nproc: int) -> None:
    table, expected = alone(kind)
    assert len(set(expected[0].weights)) > 1, "an epoch's ragged end should be among the steps"
    results = ranks.run(first_steps, nproc, (table, [], NUM_STEPS), timeout_s=100)
    for trained in results:
        assert [show(t) for t in trained] == [show(t) for t in expected]
    assert len({t.hash for t in expected}) == len(DTYPES)
