"""Experts that ranks of ep share, where ranks of tp split the rest of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.recipe.load import parse_recipe
from paceline.verifying.check import resolve_layout, verify_recipe
from tests.dist.pool import Pool
from tests.train.test_experts import SIZES, recipe_table, train_foreign
from tests.verifying.runs import PoolRunner

LAYOUTS = ("dp_replicate=2 ep=2 tp=2", "dp_shard=2 ep=2 tp=2")


def test_verify_finds_the_numbers_of_one_process(ranks: Pool, tmp_path: Path) -> None:
    layouts = [resolve_layout(text) for text in LAYOUTS]
    verified = verify_recipe(parse_recipe(recipe_table(tmp_path)), layouts, steps=2, run=PoolRunner(ranks))
    assert verified.ok, list(map(str, verified.findings))


@pytest.mark.parametrize("kind", SIZES)
def test_mixtures_of_transformers_have_the_numbers_of_one_process(ranks: Pool, kind: str) -> None:
    """Their norms and routers compute in fp32, so the numbers are those of fp64 up to that."""
    pytest.importorskip("transformers", reason="these models are those of transformers")
    [(alone, _)] = ranks.run(train_foreign, 1, (kind, "", torch.float64))
    for layout in LAYOUTS:
        for found, _ in ranks.run(train_foreign, 4, (kind, layout, torch.float64)):
            for one, other in zip(alone, found, strict=True):
                assert other == pytest.approx(one, rel=1e-6), layout
