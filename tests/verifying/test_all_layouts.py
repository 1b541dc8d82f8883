"""Every legal layout of GPT, encoder, ResNet and mixtures of experts is the same as one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.recipe import parse_recipe
from paceline.recipe.legal import Rules
from tests.dist.pool import Pool
from tests.verifying.runs import PoolRunner, verify_recipe
from tests.verifying.test_faults import recipe_table


# 8 ranks, and both reductions of each: docs/verify.md has the table of the command itself.
@pytest.mark.parametrize(
    ("kind", "num_ranks", "reduction"),
    [
        ("gpt", 2, "fast"),
        ("gpt", 4, "exact"),
        ("encoder", 2, "fast"),
        ("resnet", 4, "fast"),
        ("moe", 2, "fast"),
        ("moe", 4, "exact"),
    ],
)
def test_all_layouts_are_the_same_as_one_process(
    ranks: Pool, tmp_path: Path, kind: str, num_ranks: int, reduction: str
) -> None:
    recipe = parse_recipe(recipe_table(kind, tmp_path, reduction))
    legal, num_candidates = Rules.of(recipe).enumerate(num_ranks)
    assert 2 < len(legal) < num_candidates
    verified = verify_recipe(recipe, legal, steps=2, run=PoolRunner(ranks))
    assert [result.layout for result in verified.results] == [str(layout) for layout in legal]
    assert {result.status for result in verified.results} == {"ok"}, list(map(str, verified.findings))
    worst = max(verified.results, key=lambda result: result.worst_noise)
    assert worst.worst_noise < 20, f"{worst.layout}: the margin of the tolerance is gone"
    if reduction == "exact":
        kept = zip(legal, verified.results, strict=True)
        assert all(result.same_bits for layout, result in kept if layout.keeps_bits)
