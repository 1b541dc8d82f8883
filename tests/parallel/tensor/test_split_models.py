"""Whole models, split over 2 and 4 ranks by a plan that is found by itself, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.mesh import build_mesh
from paceline.models.gpt import Gpt
from paceline.parallel.dropout.replacements import apply_dropout
from paceline.parallel.tensor.apply import apply_plan, divide_stretches
from paceline.parallel.tensor.attention import open_attention
from paceline.parallel.tensor.differentiable import all_reduce
from paceline.parallel.tensor.split_plan import SplitPlan, find_plan
from paceline.recipe import Layout
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool
from tests.parallel.tensor.models import CASES, build, compute_loss


def split(name: str, num_ranks: int, *, sequence: bool = False) -> tuple[torch.nn.Module, SplitPlan]:
    model = build(name)
    open_attention(model)
    case = CASES[name]
    batch = {key: value[:2] if name != "seq-first" else value for key, value in case.batch().items()}
    return model, find_plan(model, lambda m: case.run(m, batch), num_ranks, sequence=sequence)


def compare(world: Any, name: str, sequence: bool = False) -> dict[str, float]:
    """Largest difference to one process, by tensor, as a share of the tensor's largest value."""
    torch.set_num_threads(1)
    reference = build(name)
    expected = compute_loss(name, reference)
    expected.backward()
    model, plan = split(name, world.world_size, sequence=sequence)
    axis = build_mesh(Layout.parse(f"tp={world.world_size}"), world).tp
    apply_plan(model, plan, axis)
    divide_stretches(model, plan, axis)
    loss = compute_loss(name, model)
    loss.backward()
    wrong = {"loss": abs(loss.item() / expected.item() - 1)}
    for (key, whole), part in zip(reference.named_parameters(), model.parameters(), strict=True):
        if whole.grad is None:
            assert part.grad is None
            continue
        grad = part.grad
        assert grad is not None, key
        if key in plan.partial:
            grad = all_reduce(grad, axis)
        expected_grad = whole.grad
        if key in plan.splits:
            expected_grad = plan.splits[key].take(expected_grad, axis.rank)
        scale = reference_scale(reference)
        wrong[key] = float((grad - expected_grad).abs().max()) / scale
    return wrong


def reference_scale(model: torch.nn.Module) -> float:
    return max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_splits_as_one_process(ranks: Pool, name: str, num_ranks: int) -> None:
    for wrong in ranks.run(compare, nproc=num_ranks, args=(name,)):
        assert max(wrong.values()) < 1e-12, {key: value for key, value in wrong.items() if value > 1e-12}


@pytest.mark.parametrize("name", CASES)
def test_nearly_all_matrices_are_split(name: str) -> None:
    _, plan = split(name, 2)
    assert plan.share >= CASES[name].share, plan.describe()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_one_head_per_rank_and_dropout(num_ranks: int) -> None:
    """With a single head memory lies otherwise, and other operations run."""
    section = GptModel(kind="gpt", layers=2, hidden=32, heads=4, dropout=0.1)
    model = Gpt(section, 96, 16).train()
    masks = apply_dropout(model)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    plan = find_plan(model, lambda m: m(ids), num_ranks, masks, sequence=True)
    assert plan.share == 1, plan.describe()
    assert {key.split("/")[1] for key, cut in plan.draws.items() if cut} == {"sdpa#0"}
    assert plan.sequence is not None
    assert len(plan.sequence.draws) == 4  # behind attention and feed-forward of two blocks


@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        "gpt-grouped",
        "encoder",
        "llama",
        "gpt2",
        "bert",
        "own-blocks",
        "lora",
        "related",
        "beside",
        "alternating",
    ],
)
def test_splits_along_the_sequence(ranks: Pool, name: str) -> None:
    for wrong in ranks.run(compare, nproc=2, args=(name, True)):
        assert max(wrong.values()) < 1e-12, {key: value for key, value in wrong.items() if value > 1e-12}


@pytest.mark.parametrize(
    ("name", "saw"),
    [
        ("vit", "takes 2x17x32, whose dimension 1 is not divisible by 2 ranks"),
        ("normed", "no blocks were found"),
    ],
)
def test_a_sequence_that_cannot_be_cut_is_refused(name: str, saw: str) -> None:
    with pytest.raises(PacelineError) as caught:
        split(name, 2, sequence=True)
    assert caught.value.code == "PL464"
    assert saw in caught.value.saw
