"""Planted faults are found, put to the right place, and told with the right cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.recipe import parse_recipe
from paceline.verifying.check import LayoutResult, resolve_layout, verify_subject
from tests.dist.pool import Pool
from tests.train.cases import digits_recipe, text_recipe
from tests.verifying.faults import FAULTS
from tests.verifying.faults.expected import EXPECTED, table
from tests.verifying.faults.models import routed_subject, tied_subject
from tests.verifying.runs import PoolRunner, verify_recipe

SUBJECTS = {"tied": tied_subject, "routed": routed_subject}


def recipe_table(kind: str, folder: Path, reduction: str = "fast", dtype: str = "fp64") -> dict[str, Any]:
    """Return a small recipe with dropout or BatchNorm, AdamW and clipping."""
    name, _, balance = kind.partition(" ")
    table = digits_recipe() if name == "resnet" else text_recipe(folder / name, name)
    if balance:
        table["model"] |= {"balance": balance}
    table["train"] |= {"reduction": reduction, "dtype": dtype}
    return table


def find(ranks: Pool, folder: Path, kind: str, layout: str, fault: str = "") -> LayoutResult:
    layouts, run = [resolve_layout(layout)], PoolRunner(ranks, fault)
    if kind in SUBJECTS:
        return verify_subject(SUBJECTS[kind](), layouts, run=run).results[0]
    return verify_recipe(parse_recipe(recipe_table(kind, folder)), layouts, steps=2, run=run).results[0]


# One of each cause on each axis; the others differ in where they are planted.
QUICK = {
    "not_summed_on_one_rank",
    "clipped_before_reduction",
    "microbatch_dropped",
    "mean_of_means",
    "dropout_the_same_every_step",
    "statistics_unsynchronised",
    "row_sum_missing",
    "entry_sum_missing",
    "summed_over_tp_in_place_of_dp",
    "norm_per_part",
    "tied_weights_untied",
    "heads_share_masks",
    "residual_masks_differ",
    "partial_gradients_not_summed",
    "sequence_takes_another_part",
    "rows_off_by_one",
    "ignored_targets_counted",
    "maximum_of_a_part",
    "start_by_rank",
    "averaged_over_shards",
    "chunk_of_another_rank",
    "shard_gradients_in_bf16",
    "gathered_once_for_all",
    "sharded_microbatch_dropped",
    "idle_round_counted",
    "replicas_not_summed",
    "dropout_from_position_zero",
    "weights_not_summed_over_cp",
    "zigzag_not_undone",
    "experts_not_summed_over_copies",
    "answers_in_another_order",
    "norm_counts_copies_on_every_rank_of_ep",
    "activations_swapped",
    "skip_gradient_dropped",
    "microbatch_lost_on_a_stage",
}


@pytest.mark.parametrize(
    "fault", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_a_planted_fault_is_found_and_explained(ranks: Pool, tmp_path: Path, fault: str) -> None:
    expected = EXPECTED[fault]
    result = find(ranks, tmp_path, expected.kind, expected.layout, fault)
    assert result.status == "differs", result
    assert result.worst > 1e9, "faults are orders of magnitude beyond rounding"
    (finding,) = result.findings
    assert finding.code == expected.code, str(finding)
    assert expected.place in finding.where, str(finding)
    for word in expected.words:
        assert word in str(finding), str(finding)


def test_the_guide_lists_the_faults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tables" / "verify-faults.md").read_text(encoding="utf-8")
    assert table() in page, f"docs/tables/verify-faults.md needs:\n{table()}"


@pytest.mark.parametrize("layout", ["pp=2 schedule=interleaved chunks=2", "pp=2 schedule=zero_bubble"])
def test_a_right_pipeline_raises_no_alarm(ranks: Pool, tmp_path: Path, layout: str) -> None:
    result = find(ranks, tmp_path, "routed", layout)
    assert result.status == "ok", list(map(str, result.findings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt", "cp=4"),
        ("gpt", "cp=2 cp_by=gather"),
        ("gpt", "cp=2 tp=2 cp_by=gather"),
        ("gpt", "cp=4 cp_by=gather"),
        ("gpt", "dp_shard=2 cp=2 cp_by=gather"),
        ("gpt", "dp_shard=2 cp=2 cp_by=gather recompute=block"),
        ("gpt", "pp=2 cp=2 cp_by=gather schedule=zero_bubble"),
        ("gpt", "pp=2 dp_shard=2 cp=2 cp_by=gather"),
        ("gpt", "dp_replicate=2 cp=2"),
        ("encoder", "dp_shard=2 cp=2"),
        ("encoder", "cp=4 cp_by=gather recompute=block"),
    ],
)
def test_a_right_division_of_sequences_raises_no_alarm(
    ranks: Pool, tmp_path: Path, kind: str, layout: str
) -> None:
    result = find(ranks, tmp_path, kind, layout)
    assert result.status == "ok", list(map(str, result.findings))
    assert result.worst_noise < 20


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("gpt", ["cp=2", "cp=2 cp_by=gather"]),
        pytest.param("gpt", ["cp=4", "cp=4 cp_by=gather", "dp_replicate=2 cp=2"], marks=pytest.mark.slow),
        pytest.param("encoder", ["cp=4", "cp=2 cp_by=gather", "dp_shard=2 cp=2"], marks=pytest.mark.slow),
    ],
)
def test_forwards_of_a_division_of_sequences_have_every_bit(
    ranks: Pool, tmp_path: Path, kind: str, layouts: list[str]
) -> None:
    """Gradients are rounded otherwise. Dropout is off: with it, attention is a batch of matrix products, and
    their last bits may depend on the number of heads."""
    recipe = recipe_table(kind, tmp_path)
    recipe["model"] |= {"dropout": 0.0}
    resolved = [resolve_layout(layout) for layout in layouts]
    for result in verify_recipe(parse_recipe(recipe), resolved, steps=1, run=PoolRunner(ranks)).results:
        assert result.status == "ok", list(map(str, result.findings))
        assert result.forward_bits, result.layout
        assert not result.same_bits


@pytest.mark.parametrize(
    ("variation", "layout"),
    [
        ("tp_sums_backwards", "tp=4"),
        ("tp_sums_backwards", "dp_replicate=2 tp=2"),
        ("shard_sums_backwards", "dp_shard=4"),
        ("products_in_2_parts", "dp_shard=2"),
    ],
)
def test_what_rounds_otherwise_is_no_fault(ranks: Pool, tmp_path: Path, variation: str, layout: str) -> None:
    result = find(ranks, tmp_path, "gpt", layout, variation)
    assert result.status == "ok", list(map(str, result.findings))
    assert not result.same_bits
    assert result.worst_noise < 20
