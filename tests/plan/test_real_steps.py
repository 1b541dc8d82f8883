"""Planned memory of whole steps, at the fullest instant, is that of the storages of real ones."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.plan.storages import CLUSTER, describe, measure_one
from paceline.plan.demand import Demands
from paceline.recipe import Layout
from tests.dist.pool import Pool

# Of 9 models and all layouts: benchmarks/plan/storages.jsonl.
LAYOUTS = [
    "dp_replicate=2",  # earlier microbatches' gradients are not in DDP's buckets yet
    "dp_replicate=1 tp=2 sequence=true",  # inputs of products are whole
]
MORE = [
    "dp_replicate=1 dp_shard=2 zero=2 recompute=block",
    "dp_replicate=1 cp=2",  # what is outside of blocks sees whole sequences
    "pp=2 dp_replicate=1 recompute=block",  # outputs wait for gradients
]


MIXTURES = [
    "dp_replicate=1 ep=2 cp=2",  # a mixture sees whole sequences, and its experts a part of the rows
    "dp_replicate=1 cp=2 recompute=block",
]


def measure(world: Any, model: str, layouts: list[str]) -> list[float]:
    return [measure_one(model, layout) for layout in layouts]


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("gpt", LAYOUTS),
        pytest.param("gpt", MORE, marks=pytest.mark.slow),
        pytest.param("moe", MIXTURES, marks=pytest.mark.slow),
    ],
    ids=["few", "more", "mixtures"],
)
def test_planned_memory_is_that_of_the_storages_of_a_step(
    ranks: Pool, model: str, layouts: list[str]
) -> None:
    measured = ranks.run(measure, 2, (model, layouts), timeout_s=90)[0]
    demands = Demands(describe(model, 2)[0], CLUSTER)
    for layout, num_bytes in zip(layouts, measured, strict=True):
        demand = demands.count(Layout.parse(layout).resolve(2))
        assert demand.total - demand.terms["libraries"] == pytest.approx(num_bytes, rel=0.05), layout
