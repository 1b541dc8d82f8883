"""Sharded training computes the gradients of one process, however the microbatches are shared out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.pool import Pool
from tests.parallel.sharded import (
    Toy,
    build_shards,
    gradients_of_one_process,
    run_step,
    whole_gradients,
)

# Per rank, how many microbatches it owns; a step each.
TWO_RANKS = [(1, 1), (2, 1), (1, 0), (3, 3), (0, 2)]
FOUR_RANKS = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 0, 0, 0), (2, 2, 2, 2)]


def gradients_of(world: Any, layout: str, steps: list[tuple[int, ...]], exact: bool, settings: Any) -> Any:
    model = Toy()
    shards, mesh = build_shards(world, layout, model, exact=exact, **settings)
    result = []
    for step, num_owned in enumerate(steps):
        run_step(shards, model, mesh.dp.rank, num_owned, step)
        result.append(whole_gradients(model))
    return result


def expect_one_process(results: list[Any], steps: list[tuple[int, ...]]) -> None:
    for step, num_owned in enumerate(steps):
        expected = gradients_of_one_process(Toy(), sum(num_owned), step)
        for of_rank in results:
            found = of_rank[step]
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_two_ranks(ranks: Pool, zero: int, exact: bool) -> None:
    results = ranks.run(gradients_of, 2, (f"dp_shard=2 zero={zero}", TWO_RANKS, exact, {}))
    expect_one_process(results, TWO_RANKS)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "layout", ["dp_shard=4 zero=3", "dp_replicate=2 dp_shard=2 zero=1", "dp_replicate=2 dp_shard=2 zero=3"]
)
def test_four_ranks(ranks: Pool, layout: str, exact: bool) -> None:
    results = ranks.run(gradients_of, 4, (layout, FOUR_RANKS, exact, {}))
    expect_one_process(results, FOUR_RANKS)
