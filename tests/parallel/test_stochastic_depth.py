"""Draws of one number per sample, as DropPath makes them, are the same on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.foreign_models.families.table import Family, call, make_text, score_tokens
from benchmarks.foreign_models.families.text import CausalAttention, Decoder, FeedForward, Layer
from benchmarks.foreign_models.families.training import SAMPLES, build, make_batches
from paceline import Trainer
from tests.dist.pool import Pool

KEPT = 0.7


def drop_by_bernoulli(x: Tensor) -> Tensor:
    """As timm does."""
    mask = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(KEPT)
    return x * mask.div_(KEPT)


def drop_by_rand(x: Tensor) -> Tensor:
    """As transformers does."""
    mask = KEPT + torch.rand((len(x), *[1] * (x.dim() - 1)), dtype=x.dtype, device=x.device)
    return x.div(KEPT) * mask.floor_()


class DropLayer(Layer):
    """Leaves its parts out for some samples."""

    def __init__(self, kind: str) -> None:
        super().__init__(CausalAttention(), FeedForward())
        self.drop = {"bernoulli": drop_by_bernoulli, "rand": drop_by_rand}[kind]

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        x = x + self.drop(self.mixer(self.norm_1(x)))
        return x + self.drop(self.feed(self.norm_2(x)))


class Stochastic(Decoder):
    """Drops behind its table too, outside of the blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = self.layers[0].drop(x) if self.training else x
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_family(kind: str) -> Family:
    return Family(
        lambda: Stochastic([DropLayer(kind) for _ in range(2)]), make_text, score_tokens, call("ids")
    )


def train(world: Any, kind: str, layout: str, size: int) -> tuple[list[float], dict[str, Tensor]]:
    family = make_family(kind)
    batches = make_batches(family)
    trainer = Trainer(
        build(family),
        forward=family.forward,
        loss=family.loss,
        optimizer=family.optimizer,
        layout=layout,
        example={key: tensor[:2] for key, tensor in batches[0].items()},
        dtype="fp64",
        microbatch_size=size,
    )
    samples = [{key: t[at] for key, t in batch.items()} for batch in batches for at in range(SAMPLES)]
    loader = trainer.loader(samples, global_batch_size=SAMPLES, shuffle=False, epochs=1)
    return [float(trainer.step(batch).loss) for batch in loader], trainer.whole_state()


def train_all(world: Any, kind: str, cases: list[tuple[str, int]]) -> list[Any]:
    return [train(world, kind, layout, size) for layout, size in cases]


@pytest.mark.parametrize("kind", ["bernoulli", "rand"])
def test_masks_do_not_depend_on_the_layout(ranks: Pool, kind: str) -> None:
    layouts = ("dp_replicate=2", "dp_shard=2", "tp=2", "tp=2 sequence=true", "pp=2", "cp=2")
    cases = [("dp_replicate=2", 4), *((layout, 2) for layout in layouts)]
    truth = ranks.run(train_all, 1, (kind, [("dp_replicate=1", 8)]))[0][0]
    for case, found in zip(cases, ranks.run(train_all, 2, (kind, cases))[0], strict=True):
        torch.testing.assert_close(found[0], truth[0], rtol=1e-10, atol=1e-12, msg=str(case))
        for name, tensor in truth[1].items():
            torch.testing.assert_close(found[1][name], tensor, rtol=1e-8, atol=1e-9, msg=f"{case} {name}")
    assert len({round(loss, 6) for loss in truth[0]}) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_are_spread_and_below_one(dtype: torch.dtype) -> None:
    from paceline.parallel.dropout.replacements import Masks

    masks = Masks("token")
    with masks.drawing(1, range(4096)):
        drawn = masks.draw_uniform("layer/rand#0", [4096, 1, 1], torch.empty(0, dtype=dtype))
    assert drawn.dtype == dtype
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.double().mean() - 0.5) < 0.02
    assert abs((drawn.double() < 0.3).double().mean() - 0.3) < 0.03
