"""Each kind of model, saved under one layout, is the same bit by bit under every other one.

The matrix of a GPT with odd sizes and of a tied model is in `test_sharded.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import paceline
from paceline.checkpoint import hash_tensors
from paceline.data import build_data
from paceline.recipe.layout import Layout
from paceline.recipe.load import parse_recipe
from paceline.train.pieces import join_pieces
from paceline.train.run import build_loader
from paceline.train.run import build_trainer as build_recipe_trainer
from tests.dist.pool import Pool
from tests.train.cases import digits_recipe, text_recipe
from tests.train.state.test_sharded import ALL, GLOBAL_BATCH, SAME_BITS, build_trainer, describe, num_ranks
from tests.train.test_layout_checkpoints import Average, plain
from tests.train.test_layout_users import build_lora
from tests.train.test_layouts import Tokens

LATER = 20


@dataclass
class Opened:
    """A trainer with its data, and what the loop does after a step."""

    trainer: paceline.Trainer
    loader: Any
    after_step: Callable[[], None] = lambda: None


def open_recipe(table: dict[str, Any], layout: str) -> Opened:
    degrees = Layout.parse(layout)
    settings = [f"layout.{word}" for word in layout.split()]
    if "dp_replicate" not in layout:
        settings.append("layout.dp_replicate=1")
    settings += ["checkpoint.mode=sharded", f"layout.zero={degrees.zero}"]
    recipe = parse_recipe(table, settings)
    data = build_data(recipe)
    trainer = build_recipe_trainer(recipe, data, 100)
    return Opened(trainer, build_loader(recipe, trainer, data.train, train=True))


def open_case(case: str, layout: str, table: dict[str, Any]) -> Opened:
    if table:
        return open_recipe(table, layout)
    trainer = build_trainer(layout, build_lora, plain, "sharded")
    average = Average(trainer.model)
    trainer.track(average=average)
    loader = trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH)
    return Opened(trainer, loader, average.update)


def describe_all(trainer: paceline.Trainer) -> tuple[str | None, str | None]:
    """Hashes of model and optimizer, and of the tracked objects' tensors, whole; on rank 0."""
    found = describe(trainer)
    parts = trainer._saver._parts()
    whole = join_pieces(trainer._saver.tracked.read(parts), parts.placement)
    tensors = [leaf for leaf in tree_leaves(whole) if isinstance(leaf, Tensor)]
    tracked = hash_tensors({str(number): tensor for number, tensor in enumerate(tensors)})
    return (found, tracked) if trainer.world.is_main else (None, None)


def take(opened: Opened, num_steps: int) -> None:
    last = opened.trainer.step_number + num_steps
    while opened.trainer.step_number < last:
        for share in opened.loader:
            number = opened.trainer.step(share).number
            opened.after_step()
            if number == last:
                break


def save_under(world: Any, case: str, layout: str, folder: str, table: Any) -> tuple[str | None, str | None]:
    torch.manual_seed(3)
    opened = open_case(case, layout, table)
    opened.trainer.resume(folder)
    take(opened, 2)
    opened.trainer.save()
    found = describe_all(opened.trainer)
    opened.trainer.close()
    return found


def load_under(
    world: Any, case: str, layout: str, folders: list[str], table: Any, num_steps: int
) -> list[tuple[str | None, str | None]]:
    found = []
    for folder in folders:
        opened = open_case(case, layout, table)
        assert opened.trainer.resume(folder) == 2
        take(opened, num_steps)
        found.append(describe_all(opened.trainer))
        opened.trainer.close()
    return found


def check(ranks: Pool, base: Path, case: str, layouts: list[str], later: list[str]) -> None:
    folders = {layout: str(base / f"run-{number}") for number, layout in enumerate(layouts)}
    table: dict[str, Any] = {}
    if case == "encoder":
        table = text_recipe(base / "text", "encoder")
    elif case == "resnet":
        table = digits_recipe()
    saved = {
        layout: ranks.run(save_under, num_ranks(layout), (case, layout, folder, table), timeout_s=120)[0]
        for layout, folder in folders.items()
    }
    same = [layout for layout in layouts if layout in SAME_BITS]
    assert len({saved[layout] for layout in same}) == 1
    for layout in layouts:
        args = (case, layout, list(folders.values()), table, 0)
        found = ranks.run(load_under, num_ranks(layout), args, timeout_s=240)[0]
        assert found == list(saved.values()), layout
    ends = set()
    for number, layout in enumerate(later):
        folder = str(base / f"later-{number}")
        shutil.copytree(folders[same[number % len(same)]], folder)
        args = (case, layout, [folder], table, LATER)
        ends.add(ranks.run(load_under, num_ranks(layout), args, timeout_s=240)[0][0])
    assert len(ends) == (1 if later else 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["encoder", "resnet", "lora"])
def test_every_layout_loads_what_every_other_saved(ranks: Pool, tmp_path: Path, case: str) -> None:
    refused = {"encoder": "none", "lora": "sequence", "resnet": "tp="}[case]
    layouts = [layout for layout in ALL if refused not in layout]
    check(ranks, tmp_path, case, layouts, sorted(SAME_BITS))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["lora"])
def test_two_layouts_load_what_the_other_saved(ranks: Pool, tmp_path: Path, case: str) -> None:
    check(ranks, tmp_path, case, ["", "dp_shard=2"], ["dp_shard=2"])
