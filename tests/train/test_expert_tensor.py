"""Experts that ranks of ep share, where ranks of tp split the rest of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.errors import PacelineError
from paceline.parallel.tensor.split_plan import find_plan
from paceline.recipe.load import parse_recipe
from paceline.verifying.check import resolve_layout
from tests.dist.pool import Pool
from tests.train.test_experts import SIZES, Tokens, build_foreign, recipe_table, train_foreign
from tests.verifying.runs import PoolRunner, verify_recipe

LAYOUTS = ("dp_replicate=2 ep=2 tp=2", "dp_shard=2 ep=2 tp=2")


def test_verify_finds_the_numbers_of_one_process(ranks: Pool, tmp_path: Path) -> None:
    layouts = [resolve_layout(text) for text in LAYOUTS]
    verified = verify_recipe(parse_recipe(recipe_table(tmp_path)), layouts, steps=2, run=PoolRunner(ranks))
    assert verified.ok, list(map(str, verified.findings))


def test_every_axis_at_once_on_32_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of cp, which have the same tokens, and two data ranks share the experts."""
    table = recipe_table(tmp_path)
    table["train"] |= {"global_batch_size": 16, "microbatch_size": 1}
    layout = resolve_layout("pp=2 dp_replicate=2 dp_shard=2 cp=2 tp=2 ep=4")
    monkeypatch.setattr("tests.dist.pool.MAX_RANKS", layout.num_ranks)
    pool = Pool()  # one of its own, so that later tests do not keep so many processes
    try:
        run = PoolRunner(pool, timeout_s=300.0)
        verified = verify_recipe(parse_recipe(table), [layout], steps=3, run=run)
    finally:
        pool.close()
    assert layout.num_ranks == 32
    assert verified.ok, list(map(str, verified.findings))


@pytest.mark.parametrize("kind", [kind for kind in SIZES if kind != "Olmoe"])
def test_mixtures_of_transformers_have_the_numbers_of_one_process(ranks: Pool, kind: str) -> None:
    """Their norms and routers compute in fp32, so the numbers are those of fp64 up to that."""
    pytest.importorskip("transformers", reason="these models are those of transformers")
    [(alone, _)] = ranks.run(train_foreign, 1, (kind, "", torch.float64))
    for layout in LAYOUTS:
        for found, _ in ranks.run(train_foreign, 4, (kind, layout, torch.float64)):
            for one, other in zip(alone, found, strict=True):
                assert other == pytest.approx(one, rel=1e-6), layout


def test_norms_over_all_heads_leave_nothing_to_split() -> None:
    """Those of OLMoE; its other matrices are experts, which ranks of ep share."""
    pytest.importorskip("transformers", reason="this model is that of transformers")
    ids = Tokens()[0]["ids"][None]
    with pytest.raises(
        PacelineError, match=r"mean in model.layers.0.self_attn.q_norm needs all of it"
    ) as caught:
        find_plan(build_foreign("Olmoe"), lambda model: model(input_ids=ids, labels=ids).loss, 2)
    assert caught.value.code == "PL461"
