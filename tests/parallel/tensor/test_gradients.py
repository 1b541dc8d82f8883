"""Hooks on parameters see under tp the gradients that they see in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.models.gpt import Gpt
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool, RankError
from tests.train.test_layouts import Tokens, build_trainer

STEPS = 3
# Split by columns and by rows, tied along the vocabulary, and whole ones: an addend on each rank with
# `sequence`, and the whole gradient without.
HOOKED = (
    "layers.0.self_attn.q_proj.weight",
    "layers.1.mlp.down_proj.weight",
    "embed_tokens.weight",
    "layers.1.input_layernorm.weight",
)


def normalise(gradient: Tensor) -> Tensor:
    """Normalise a gradient, which no part of it could do alone."""
    return gradient / (gradient.norm() + 1e-3)


def halve(gradient: Tensor) -> None:
    """Halve a gradient in place, and return nothing."""
    gradient[0] *= 0.5


class Hooked(Gpt):
    """Registers a hook where it is built."""

    def __init__(self) -> None:
        super().__init__(GptModel(kind="gpt", layers=2, hidden=32, heads=4, kv_heads=4), 64, 8)
        self.get_parameter(HOOKED[0]).register_hook(normalise)


def train(world: Any, layouts: list[str], from_factory: bool) -> list[list[float]]:
    return [_train(layout, from_factory) for layout in layouts]


def _train(layout: str, from_factory: bool) -> list[float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Hooked if from_factory else Hooked()
    handles = []
    if isinstance(model, nn.Module):
        handles = [model.get_parameter(name).register_hook(normalise) for name in HOOKED]
    trainer = build_trainer(layout, model=model)
    parameters = dict(trainer.model.named_parameters())
    numbers = []
    for share in trainer.loader(Tokens(), global_batch_size=12):
        step = trainer.step(share)
        numbers += [step.loss, step.grad_norm]
        if step.number == 1:
            handles += [
                parameters[name].register_hook(hook) for name in HOOKED for hook in (normalise, halve)
            ]
        if step.number == 2:
            for handle in handles:
                handle.remove()
        if step.number == STEPS:
            break
    trainer.close()
    return numbers


@pytest.mark.parametrize(
    ("nproc", "layouts"),
    [(2, ["tp=2", "tp=2 sequence=true"]), (4, ["dp_shard=2 tp=2", "dp_replicate=2 tp=2", "cp=2 tp=2"])],
)
@pytest.mark.parametrize("from_factory", [False, True])
def test_hooks_work_as_in_one_process(
    ranks: Pool, nproc: int, layouts: list[str], from_factory: bool
) -> None:
    ((expected,),) = ranks.run(train, 1, ([""], from_factory))
    for found in ranks.run(train, nproc, (layouts, from_factory)):
        for layout, numbers in zip(layouts, found, strict=True):
            assert numbers == pytest.approx(expected, rel=1e-11), layout


def refuse(world: Any) -> None:
    model = Hooked()
    weight = model.get_parameter(HOOKED[1])
    weight.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]
    build_trainer("tp=2", model=model)


def test_hooks_on_accumulated_gradients_are_refused(ranks: Pool) -> None:
    with pytest.raises(RankError, match="PL434") as caught:
        ranks.run(refuse)
    assert HOOKED[1] in str(caught.value)
