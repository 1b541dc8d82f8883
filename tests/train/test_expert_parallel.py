"""Experts that ranks share: the bits of one process, 1/ep of the memory, and messages as the formula says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import hash_tensors
from paceline.data import build_data
from paceline.errors import PacelineError
from paceline.recipe import parse_recipe as parse
from paceline.recipe.load import parse_recipe
from paceline.train.run import build_loader, build_trainer
from paceline.verifying.check import resolve_layout, verify_recipe
from tests.dist.pool import Pool
from tests.train.test_experts import recipe_table, train_one_expert
from tests.verifying.runs import PoolRunner

LAYOUTS = {"dp_replicate=2 ep=2": 2, "dp_replicate=4 ep=2": 4, "dp_replicate=4 ep=4": 4}


def list_settings(layout: str) -> list[str]:
    return [f"layout.{word}" for word in layout.split()]


def train(world: Any, table: dict[str, Any], layout: str, num_steps: int) -> Any:
    recipe = parse_recipe(table, list_settings(layout))
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, num_steps)
    steps: list[Any] = []
    while len(steps) < num_steps:
        for share in build_loader(recipe, trainer, data.train, train=True):
            steps.append(trainer.step(share))
            if len(steps) == num_steps:
                break
    measured = trainer.evaluate(build_loader(recipe, trainer, data.valid, train=False))
    state = trainer.whole_state()
    numbers = [(step.loss, step.grad_norm) for step in steps], measured
    return numbers, hash_tensors(state) if world.is_main else ""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_have_the_bits_of_one_process(ranks: Pool, tmp_path: Path, dtype: str) -> None:
    """With clipping. Ranks have different numbers of microbatches; some have none at the end of an epoch."""
    table = recipe_table(tmp_path, dtype)
    table["train"] |= {"clip_norm": 0.05, "microbatch_size": 3}
    alone = ranks.run(train, 1, (table, "", 6))[0]
    assert max(norm for _, norm in alone[0][0]) > 0.05
    for layout, num_ranks in LAYOUTS.items():
        assert ranks.run(train, num_ranks, (table, layout, 6))[0] == alone, layout


def test_an_expert_may_get_all_tokens_or_none(ranks: Pool) -> None:
    alone = ranks.run(train_one_expert, 1, ("",))[0]
    for layout, num_ranks in LAYOUTS.items():
        assert ranks.run(train_one_expert, num_ranks, (layout,))[0] == alone, layout


def test_verify_finds_every_bit_the_same(ranks: Pool, tmp_path: Path) -> None:
    layouts = [resolve_layout(text) for text in LAYOUTS]
    verified = verify_recipe(parse(recipe_table(tmp_path)), layouts, steps=2, run=PoolRunner(ranks))
    assert verified.ok, list(map(str, verified.findings))
    assert all(result.same_bits for result in verified.results)


def hook_experts(world: Any, table: dict[str, Any]) -> str:
    recipe = parse_recipe(table, list_settings("dp_replicate=2 ep=2"))
    data = build_data(recipe)
    trainer = build_trainer(recipe, data, 1)
    name = next(name for name, _ in trainer.model.named_parameters() if name.endswith("experts.down_proj"))
    dict(trainer.model.named_parameters())[name].register_hook(lambda gradient: None)
    share = next(iter(build_loader(recipe, trainer, data.train, train=True)))
    with pytest.raises(PacelineError) as caught:
        trainer.step(share)
    return str(caught.value)


def test_a_hook_that_would_see_parts_is_refused(ranks: Pool, tmp_path: Path) -> None:
    for text in ranks.run(hook_experts, 2, (recipe_table(tmp_path),)):
        assert "PL657" in text
        assert "down_proj" in text
