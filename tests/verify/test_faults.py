"""Planted faults are found, put to the right place, and told with the right cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.recipe import parse_recipe
from paceline.verify.check import LayoutResult, resolve_layout, verify_recipe
from tests.dist.pool import Pool
from tests.train.cases import digits_recipe, text_recipe
from tests.verify.faults import FAULTS
from tests.verify.runs import PoolRunner

# By fault: kind of model, layout, code of the cause, place it is put to, words in the message.
EXPECTED: dict[str, tuple[str, str, str, str, list[str]]] = {
    "not_summed_on_one_rank": (
        "gpt",
        "dp_replicate=2",
        "PL705",
        "step 1",
        ["on rank 1 only", "0 for the others"],
    ),
    "averaged_twice": (
        "gpt",
        "dp_replicate=2",
        "PL703",
        "step 1",
        ["1/2 of", "dp_replicate=2", "on all 2 ranks"],
    ),
    "summed_twice": (
        "gpt",
        "dp_replicate=4",
        "PL703",
        "step 1",
        ["4 times", "summed over dp_replicate=4 again"],
    ),
    "clipped_before_reduction": (
        "gpt",
        "dp_replicate=2",
        "PL706",
        "step 1",
        ["factor of its own", "clipping"],
    ),
    "microbatch_dropped": ("gpt", "dp_replicate=2", "PL704", "step 1", ["Microbatch 2 of 4", "rank 1"]),
    "gradient_overwritten": ("gpt", "dp_replicate=2", "PL704", "step 1", ["nothing of microbatch 0, 2"]),
    "mean_of_means": ("encoder", "dp_replicate=2", "PL706", "step 1", ["mean of the microbatches' means"]),
    "dropout_by_rank": (
        "gpt",
        "dp_replicate=2",
        "PL702",
        "step 1",
        ["after rotary and before layers.0", "Other elements are 0", "rank 1 only"],
    ),
    "wrong_seed": (
        "encoder",
        "dp_replicate=2",
        "PL702",
        "step 1, dropout",
        ["Dropout has dropout 0.1", "on all 2 ranks"],
    ),
    "dropout_the_same_every_step": ("encoder", "dp_replicate=2", "PL702", "step 2, dropout", ["dropout 0.1"]),
    "statistics_unsynchronised": (
        "resnet",
        "dp_replicate=2",
        "PL710",
        "stem_norm.running",
        ["on all 2 ranks"],
    ),
    "norm_of_a_part": ("gpt", "dp_replicate=2", "PL708", "step 1", ["times the reference's"]),
    "another_start_on_one_rank": ("gpt", "dp_replicate=2", "PL700", "before step 1", ["on rank 1 only"]),
    "rounded_to_bf16": ("gpt", "dp_replicate=2", "PL712", "the sum of gradients", ["16-bit"]),
}


def recipe_table(kind: str, folder: Path, reduction: str = "fast", dtype: str = "fp64") -> dict[str, Any]:
    """A small recipe with dropout or BatchNorm, AdamW and clipping."""
    table = digits_recipe() if kind == "resnet" else text_recipe(folder / kind, kind)
    table["train"] |= {"reduction": reduction, "dtype": dtype}
    return table


def find(ranks: Pool, table: dict[str, Any], layout: str, fault: str = "") -> LayoutResult:
    recipe, steps = parse_recipe(table), 3
    return verify_recipe(recipe, [resolve_layout(layout)], steps=steps, run=PoolRunner(ranks, fault)).results[
        0
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_explained(ranks: Pool, tmp_path: Path, fault: str) -> None:
    kind, layout, code, place, words = EXPECTED[fault]
    result = find(ranks, recipe_table(kind, tmp_path), layout, fault)
    assert result.status == "differs"
    assert result.worst > 1e9, "faults are orders of magnitude beyond rounding"
    (finding,) = result.findings
    assert finding.code == code, str(finding)
    assert place in finding.where, str(finding)
    for word in words:
        assert word in str(finding), str(finding)
