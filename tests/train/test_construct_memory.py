"""Host memory of ranks while a factory's model gets its values, counted from storages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.models.gpt import Gpt
from paceline.parallel.construct.hand_out import Construction
from paceline.parallel.placement import local
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool
from tests.train.test_pipeline import GPT_EXAMPLE
from tests.train.test_pipeline_layouts import build


def long_gpt() -> nn.Module:
    return Gpt(GptModel(kind="gpt", layers=8, hidden=128, heads=4, tie_embeddings=False), 256, 16)


def count_live() -> int:
    """Return bytes of all tensors of this process that have memory."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not is_lazy(each)]
    found = [each for each in found if not each.is_meta and each.layout is torch.strided]
    storages = {local(each).untyped_storage() for each in found}
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def count_filling(world: Any, layout: str) -> tuple[int, int, int]:
    """Return the most bytes of tensors while the model is built and filled, those of own parameters, and of
    the largest parameter."""
    hand_out, before = Construction.hand_out, count_live()
    most = 0

    def counting(self: Construction, *args: Any) -> Iterator[tuple[list[str], int, Tensor]]:
        nonlocal most
        most = max(most, count_live() - before)
        for names, first, whole in hand_out(self, *args):
            most = max(most, count_live() - before)
            yield names, first, whole
            del whole

    with mock.patch.object(Construction, "hand_out", counting):
        trainer = build(layout, model=long_gpt, example=GPT_EXAMPLE)
    sizes = [4 * p.numel() for p in trainer.model.parameters()]
    own = sum(local(p).untyped_storage().nbytes() for p in trainer.model.parameters() if not p.is_meta)
    trainer.close()
    return most, own, max(sizes)


@pytest.mark.parametrize("layout", ["pp=2", "dp_shard=2", "tp=2"])
def test_ranks_but_the_first_hold_their_part_and_one_tensor(ranks: Pool, layout: str) -> None:
    whole = sum(4 * p.numel() for p in long_gpt().parameters())
    (first, *_), *others = ranks.run(count_filling, 2, (layout,), timeout_s=60)
    assert first > whole, "it has built the model"
    for most, own, largest in others:
        assert own < 0.7 * whole
        slack = whole // 50  # small tensors without random numbers have values too, until they get those
        assert own <= most <= own + largest + slack
