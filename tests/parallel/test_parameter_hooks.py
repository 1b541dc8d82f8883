"""Hooks on parameters, which would see other numbers than in one process under some layouts, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import PacelineError
from paceline.models.gpt import Gpt
from paceline.parallel.parameter_hooks import check_hooks, has_hooks, move_hooks
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool
from tests.train.test_layouts import Tokens, build_trainer

NAME = "layers.0.self_attn.q_proj.weight"


def add_hook(model: nn.Module, kind: str) -> None:
    getattr(model.get_parameter(NAME), kind)(lambda *_: None)


def run(world: Any, layout: str, kind: str, is_late: bool) -> str:
    """Return the error of hooks registered before the build, or after the first step."""
    torch.manual_seed(0)
    model = Gpt(GptModel(kind="gpt", layers=2, hidden=32, heads=4, kv_heads=4), 64, 8)
    if not is_late:
        add_hook(model, kind)
    try:
        trainer = build_trainer(layout, model=model)
        for share in trainer.loader(Tokens(), global_batch_size=12):
            if trainer.step(share).number == 2:
                return ""
            if is_late:
                add_hook(trainer.model, kind)
    except PacelineError as error:
        return str(error)
    raise AssertionError


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2", "cp=2"])
def test_hooks_are_refused_where_no_rank_has_the_gradient(
    ranks: Pool, layout: str, kind: str, is_late: bool
) -> None:
    for text in ranks.run(run, 2, (layout, kind, is_late)):
        assert NAME in text
        assert "PL434" in text


def test_replicas_run_hooks(ranks: Pool) -> None:
    assert ranks.run(run, 2, ("dp_replicate=2", "register_hook", False)) == ["", ""]


def loop_with_a_late_hook(world: Any) -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = paceline.Loop(model, optimizer, layout="tp=2", example=torch.ones(2, 8), microbatch_size=2)
    try:
        for step in loop.loader(
            torch.utils.data.DataLoader(torch.randn(16, 8).tolist(), batch_size=4), epochs=1
        ):
            for batch in step:
                model(torch.stack(batch, 1).float()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model[0].weight.register_hook(lambda gradient: gradient * 2)
    except PacelineError as error:
        return str(error)
    raise AssertionError


def test_a_loop_of_ones_own_refuses_them_too(ranks: Pool) -> None:
    for text in ranks.run(loop_with_a_late_hook, 2):
        assert "0.weight" in text
        assert "PL434" in text


def test_hooks_that_only_look_move_with_their_handles() -> None:
    old, model = nn.Linear(2, 2), nn.Linear(2, 2)

    class Looks:
        only_looks = True

        def __call__(self, gradient: torch.Tensor) -> None:
            self.seen = gradient

    looks = Looks()
    handle = old.weight.register_hook(looks)
    check_hooks(old.named_parameters())
    move_hooks(dict(old.named_parameters()), model)
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(looks.seen, torch.ones(2, 2))
    handle.remove()
    assert not has_hooks(model.weight)


def test_a_long_list_is_cut() -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(5))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]
    with pytest.raises(PacelineError, match="and 2 more") as caught:
        check_hooks(model.named_parameters())
    assert caught.value.code == "PL434"
