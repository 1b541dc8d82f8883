"""`cp` beside other axes is the same as one process, dropout included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.recipe import parse_recipe
from paceline.verifying.check import resolve_layout
from tests.dist.pool import Pool
from tests.train.test_pipeline_layouts import FAST, build
from tests.train.test_pipeline_ragged import Uneven, long_gpt
from tests.verifying.runs import PoolRunner, verify_recipe
from tests.verifying.test_faults import recipe_table

LAYOUTS = {
    # Those without recompute are among `tests/verifying/test_all_layouts.py`'s.
    "gpt": ["cp=2 recompute=block", "cp=2 cp_by=gather recompute=block", "pp=2 cp=2 cp_by=gather"],
    "encoder": ["cp=2 dp_shard=2 zero=2 recompute=selective"],
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_sequences_are_divided_as_in_one_process(ranks: Pool, tmp_path: Path, kind: str) -> None:
    recipe = parse_recipe(recipe_table(kind, tmp_path, "exact"))
    layouts = [resolve_layout(text) for text in LAYOUTS[kind]]
    verified = verify_recipe(recipe, layouts, steps=2, run=PoolRunner(ranks))
    assert {result.status for result in verified.results} == {"ok"}, list(map(str, verified.findings))
    assert max(result.worst for result in verified.results) < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("gpt", "cp=2 tp=2"),
        ("encoder", "cp=2 tp=2 recompute=selective"),
        ("gpt", "dp_replicate=2 cp=2 tp=2"),
        ("gpt", "dp_shard=2 cp=2 tp=2 recompute=block"),
        ("encoder", "dp_shard=2 cp=2 tp=2 zero=1"),
        ("gpt", "cp=2 tp=2 cp_by=gather"),
        ("gpt", "pp=2 cp=2 tp=2 recompute=block"),
        ("gpt", "pp=2 dp_shard=2 cp=2"),
    ],
)
def test_heads_are_divided_by_both(ranks: Pool, tmp_path: Path, kind: str, text: str) -> None:
    recipe = parse_recipe(recipe_table(kind, tmp_path))
    (result,) = verify_recipe(recipe, [resolve_layout(text)], steps=2, run=PoolRunner(ranks)).results
    assert result.status == "ok", list(map(str, result.findings))
    assert result.worst_noise < 20


def test_tp_recomputes_blocks_from_whole_sequences(ranks: Pool, tmp_path: Path) -> None:
    """The second forward of the first block begins with the sequence before it is cut."""
    recipe = parse_recipe(recipe_table("gpt", tmp_path))
    layouts = [resolve_layout("tp=2 sequence=true recompute=block")]
    (result,) = verify_recipe(recipe, layouts, steps=1, run=PoolRunner(ranks)).results
    assert result.status == "ok", list(map(str, result.findings))


EXAMPLE = {"ids": torch.zeros(4, 9, dtype=torch.int64)}


def train_uneven(world: Any, layouts: list[str]) -> list[Any]:
    """Return losses and norms of two steps, each of three microbatches of 31, 16 and 63 positions."""
    found = []
    for layout in layouts:
        trainer = build(layout, model=long_gpt, microbatch_size=1, **{**FAST, "example": EXAMPLE})
        share = next(iter(trainer.loader(Uneven(), global_batch_size=3, shuffle=False)))
        steps = [trainer.step(share), trainer.step({"ids": torch.full((1, 6), 3)})]
        found.append([(step.loss, step.grad_norm) for step in steps])
        trainer.close()
    return found


UNEVEN = [
    "pp=2 cp=2 recompute=block",
    "pp=2 cp=2 cp_by=gather schedule=zbv",
    "pp=2 cp=2 cp_by=gather schedule=interleaved chunks=2 recompute=selective",
]


@pytest.mark.parametrize(
    "layouts", [UNEVEN[:1], pytest.param(UNEVEN[1:], marks=pytest.mark.slow)], ids=["one", "more"]
)
def test_microbatches_of_a_pipeline_keep_their_lengths(ranks: Pool, layouts: list[str]) -> None:
    """Forwards of other lengths run between a microbatch's forward on a stage and its backward."""
    [expected] = ranks.run(train_uneven, 1, ([""],))[0]
    for found in ranks.run(train_uneven, 4, (layouts,), timeout_s=120)[0]:
        assert found == [pytest.approx(pair, rel=1e-10) for pair in expected]
