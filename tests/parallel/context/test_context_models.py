"""Whole models whose sequences are divided over 2 and 4 ranks by a plan that is found by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.mesh import build_mesh
from paceline.parallel.context.apply import apply_context
from paceline.parallel.context.find import find_context_plan
from paceline.parallel.context.plan import ContextPlan
from paceline.parallel.tensor.attention import open_attention
from paceline.parallel.tensor.collectives import all_reduce
from paceline.recipe import Layout
from tests.dist.pool import Pool
from tests.parallel.tensor.models import CASES, build, compute_loss

# By name, the degrees of cp that divide its heads.
DIVIDED = {
    "gpt": (2,),
    "gpt-grouped": (2,),
    "lora": (4,),
    "encoder": (2,),
    "transformer": (2,),
    "seq-first": (2,),
    "llama": (2,),
    "gpt2": (4,),
    "t5": (2, 4),
    "bert": (2,),
    "vit": (2, 4),
}


def divide(name: str, num_ranks: int) -> tuple[torch.nn.Module, ContextPlan]:
    model = build(name)
    open_attention(model)
    case = CASES[name]
    batch = {key: value[:2] if name != "seq-first" else value for key, value in case.batch().items()}
    return model, find_context_plan(model, lambda m: case.run(m, batch), num_ranks)


def compare(world: Any, names: list[str]) -> dict[str, tuple[bool, float]]:
    """By model: whether the loss has the bits of one process, and the largest difference of a gradient."""
    torch.set_num_threads(1)
    axis = build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp
    found = {}
    for name in names:
        reference = build(name)
        open_attention(reference)
        expected = compute_loss(name, reference)
        expected.backward()
        model, plan = divide(name, world.world_size)
        apply_context(model, plan, axis)
        loss = compute_loss(name, model)
        loss.backward()
        scale = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
        worst = 0.0
        for (key, whole), part in zip(reference.named_parameters(), model.parameters(), strict=True):
            if whole.grad is None:
                assert part.grad is None, key
                continue
            assert part.grad is not None, key
            grad = all_reduce(part.grad, axis) if key in plan.partial else part.grad
            worst = max(worst, float((grad - whole.grad).abs().max()) / scale)
        found[name] = (torch.equal(loss, expected), worst)
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_foreign_models_as_one_process(ranks: Pool, num_ranks: int) -> None:
    """The forward has every bit; gradients are sums over the sequence, in another order."""
    names = [name for name, degrees in DIVIDED.items() if num_ranks in degrees]
    for found in ranks.run(compare, nproc=num_ranks, args=(names,)):
        wrong = {name: seen for name, seen in found.items() if not seen[0] or seen[1] > 1e-12}
        assert not wrong, wrong
