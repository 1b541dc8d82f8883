"""The same numbers on any number of ranks, dropout and BatchNorm included, with the library's all-reduce.

The exact reduction, with the same bits, is in `test_exact.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.dist.pool import Pool
from tests.train.cases import (
    Trained,
    assert_ranks_agree,
    assert_same_run,
    digits_recipe,
    text_recipe,
    train_recipe_table,
)

NUM_STEPS = 20


def first_steps(world: Any, table: dict[str, Any], dtypes: list[str]) -> list[Trained]:
    settings = [["train.reduction=fast", f"train.dtype={dtype}"] for dtype in dtypes]
    return [train_recipe_table(world, table, these, NUM_STEPS) for these in settings]


@pytest.fixture(scope="module")
def one_process(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """By kind of model, its recipe and what one rank makes of it."""
    folder = tmp_path_factory.mktemp("recipes")

    @functools.cache
    def train(kind: str) -> Any:
        table = digits_recipe() if kind == "resnet" else text_recipe(folder / kind, kind)
        return table, ranks.run(first_steps, nproc=1, args=(table, ["fp64", "fp32"]))[0]

    return train


# All three on 2, 3 and 4 ranks: benchmarks/same_numbers.
@pytest.mark.parametrize(
    ("kind", "nproc"), [("gpt", 2), ("gpt", 3), ("gpt", 4), ("encoder", 3), ("resnet", 2), ("resnet", 4)]
)
def test_the_first_steps_are_the_same(
    ranks: Pool, one_process: Callable[[str], Any], kind: str, nproc: int
) -> None:
    table, (double, single) = one_process(kind)
    results = ranks.run(first_steps, nproc=nproc, args=(table, ["fp64", "fp32"]))
    assert_ranks_agree([doubles for doubles, _ in results])
    assert_ranks_agree([singles for _, singles in results])
    assert_same_run(double, results[0][0], losses=1e-12, tensors=1e-10)
    assert_same_run(single, results[0][1], losses=1e-5)
    assert len(set(double.losses)) == NUM_STEPS
    assert len(set(double.weights)) > 1, "an epoch's ragged end should be among the steps"
