"""Whole models whose sequences are divided over 2 and 4 ranks by a plan that is found by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.mesh import build_mesh
from paceline.parallel.context.apply import apply_context
from paceline.parallel.context.context_plan import ContextPlan
from paceline.parallel.context.find import find_context_plan
from paceline.parallel.split import Split
from paceline.parallel.tensor.apply import apply_plan
from paceline.parallel.tensor.attention import open_attention
from paceline.parallel.tensor.differentiable import all_gather, all_reduce
from paceline.parallel.tensor.split_plan import find_plan
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


def divide(name: str, num_ranks: int, tp: int = 1, by: str = "heads") -> tuple[torch.nn.Module, ContextPlan]:
    model = build(name)
    open_attention(model)
    return model, find_context_plan(model, example(name), num_ranks, tp=tp, by=by)


def example(name: str) -> Callable[[torch.nn.Module], Any]:
    case = CASES[name]
    batch = {key: value[:2] if name != "seq-first" else value for key, value in case.batch().items()}
    return lambda m: case.run(m, batch)


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


# Models whose four key and value heads two axes of two ranks divide.
DIVIDED_TWICE = ["encoder", "transformer", "seq-first", "lora", "gpt2", "t5", "bert", "vit"]
# By gather, tp alone divides the two of these.
GATHERED = ["llama", "gpt-grouped", "encoder", "transformer", "bert"]


def compare_with_tp(world: Any, names: list[str], by: str) -> dict[str, float]:
    """By model, the largest difference of its loss or a gradient, on cp=2 tp=2, in parts of the largest."""
    torch.set_num_threads(1)
    mesh = build_mesh(Layout.parse("cp=2 tp=2"), world)
    found = {}
    for name in names:
        reference = build(name)
        open_attention(reference)
        expected = compute_loss(name, reference)
        expected.backward()
        model, context = divide(name, 2, tp=2, by=by)
        plan = find_plan(model, example(name), 2)
        assert plan.share > 0.5, plan.describe()
        apply_plan(model, plan, mesh.tp)
        apply_context(model, context, mesh.cp)
        loss = compute_loss(name, model)
        loss.backward()
        scale = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
        worst = abs(float(loss.detach() / expected.detach()) - 1)
        for (key, whole), part in zip(reference.named_parameters(), model.parameters(), strict=True):
            if whole.grad is None:
                continue
            assert part.grad is not None, key
            grad = all_reduce(part.grad, mesh.cp) if key in context.partial else part.grad
            grad = all_reduce(grad, mesh.tp) if key in plan.partial else grad
            split = plan.splits.get(key)
            grad = grad if split is None else join(split, grad, mesh.tp)
            worst = max(worst, float((grad - whole.grad).abs().max()) / scale)
        found[name] = worst
    return found


def join(split: Split, part: torch.Tensor, axis: Any) -> torch.Tensor:
    return split.join(all_gather(part.unsqueeze(0), axis, 0).unbind(0))


@pytest.mark.slow
@pytest.mark.parametrize(("by", "names"), [("heads", DIVIDED_TWICE), ("gather", GATHERED)])
def test_foreign_models_divided_over_cp_and_tp(ranks: Pool, by: str, names: list[str]) -> None:
    for found in ranks.run(compare_with_tp, nproc=4, args=(names, by)):
        assert max(found.values()) < 1e-11, found
