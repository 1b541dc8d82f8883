"""Optimizer state by name: exact, and indifferent to order and grouping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint import CheckpointFolder
from paceline.checkpoint.content import prepare_whole
from paceline.errors import PacelineError
from paceline.train.optimizer_state import load_optimizer_state_by_name, optimizer_state_by_name
from tests.checkpoint.states import assert_same, load_checkpoint, save_content


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)
    model.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    return model


def take_step(model: nn.Sequential, optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    batch = torch.randn(4, 5, generator=generator).to(model[0].weight.dtype)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def through_disk(tree: Any, folder: Path) -> Any:
    path = save_content(CheckpointFolder(folder, keep=1), 1, prepare_whole({}, tree, {}, None), identity={})
    return load_checkpoint(path).optimizer


class Fp32Moments(Optimizer):
    """Keeps its moments wider than the weights, and a few things that are not tensors."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "note": "text"})

    def step(self, closure: Any = None) -> None:
        closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(moment=torch.zeros_like(parameter, dtype=torch.float32), kind="slow")
                    state.update(history=[torch.zeros(2), (1, None)], mask=torch.zeros(3, dtype=torch.bool))
                state["moment"].mul_(0.9).add_(parameter.grad, alpha=1 / 3)
                parameter.data.add_(state["moment"], alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.9)),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3, max_iter=3),
    "own": lambda p: Fp32Moments(p, lr=1e-2),
}


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_goes_on_bit_for_bit(build: Callable[[Any], Optimizer], tmp_path: Path) -> None:
    model = make_model()
    optimizer = build(model.parameters())
    for number in range(4):
        take_step(model, optimizer, number)
    tree = through_disk(optimizer_state_by_name(optimizer, model.named_parameters()), tmp_path)
    assert_same(tree, optimizer_state_by_name(optimizer, model.named_parameters()))
    again = make_model()
    again.load_state_dict(model.state_dict())
    other = build(again.parameters())
    load_optimizer_state_by_name(other, again.named_parameters(), tree)
    for number in range(4, 8):
        take_step(model, optimizer, number)
        take_step(again, other, number)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same(
        optimizer_state_by_name(other, again.named_parameters()),
        optimizer_state_by_name(optimizer, model.named_parameters()),
    )


def test_wide_moments_of_bf16_weights_keep_their_bits(tmp_path: Path) -> None:
    model = make_model(torch.bfloat16)
    optimizer = Fp32Moments(model.parameters(), lr=1e-2)
    take_step(model, optimizer, 0)
    tree = through_disk(optimizer_state_by_name(optimizer, model.named_parameters()), tmp_path)
    other = Fp32Moments(model.parameters(), lr=1e-2)
    load_optimizer_state_by_name(other, model.named_parameters(), tree)
    state = other.state[model[0].weight]
    assert_same(state, optimizer.state[model[0].weight])
    assert state["moment"].dtype == torch.float32
    assert state["kind"] == "slow"


def named_groups(model: nn.Module, order: int) -> list[dict[str, Any]]:
    """Decay on matrices only, in one order or another, or one group per parameter."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decay = {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1, "lr": 0.01}
    rest = {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}
    if order == 0:
        return [decay, rest]
    if order == 1:
        return [rest | {"params": rest["params"][::-1]}, decay | {"params": decay["params"][::-1]}]
    return [{"params": [p]} for p in reversed(trained)]


@pytest.mark.parametrize("order", [1, 2])
def test_order_and_grouping_do_not_matter(order: int, tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(named_groups(model, 0), lr=1e-3)
    take_step(model, optimizer, 0)
    optimizer.param_groups[1]["lr"] = 5e-4  # as a schedule would
    tree = through_disk(optimizer_state_by_name(optimizer, model.named_parameters()), tmp_path)
    again = copy.deepcopy(model)
    other = torch.optim.AdamW(named_groups(again, order), lr=7.0)
    load_optimizer_state_by_name(other, again.named_parameters(), tree)
    by_name = dict(again.named_parameters())
    for group in other.param_groups:
        for parameter in group["params"]:
            expected = 0.01 if parameter.dim() > 1 else 5e-4
            assert (group["lr"], group["weight_decay"]) == (expected, 0.1 if parameter.dim() > 1 else 0.0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert_same(other.state[by_name[name]], optimizer.state[parameter])
    take_step(model, optimizer, 1)
    take_step(again, other, 1)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def test_what_was_loaded_is_a_copy() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    take_step(model, optimizer, 0)
    tree = copy.deepcopy(optimizer_state_by_name(optimizer, model.named_parameters()))
    kept = copy.deepcopy(tree)
    other = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1.0))
    load_optimizer_state_by_name(other, model.named_parameters(), tree)
    take_step(model, other, 1)
    other.param_groups[0]["lr"].mul_(2)
    assert_same(tree, kept)


def test_how_it_is_computed_stays_as_built() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True, lr=0.5)
    take_step(model, optimizer, 0)
    tree = optimizer_state_by_name(optimizer, model.named_parameters())
    other = torch.optim.AdamW(model.parameters(), fused=True)
    load_optimizer_state_by_name(other, model.named_parameters(), tree)
    (group,) = other.param_groups
    assert (group["fused"], group["foreach"], group["lr"]) == (True, None, 0.5)
    take_step(model, other, 1)


def test_state_that_belongs_to_no_parameter() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["calls"] = 3  # type: ignore[index]
    other = torch.optim.SGD(model.parameters())
    tree = optimizer_state_by_name(optimizer, model.named_parameters())
    load_optimizer_state_by_name(other, model.named_parameters(), tree)
    assert other.state["calls"] == 3  # type: ignore[index]


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_cuda_state_goes_on_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    models = [make_model().cuda() for _ in range(2)]
    one, other = (torch.optim.AdamW(model.parameters(), **settings) for model in models)
    for number in range(2):
        for parameter in models[0].parameters():
            parameter.grad = torch.full_like(parameter, 0.1 + number)
        one.step()
    models[1].load_state_dict(models[0].state_dict())
    tree = through_disk(optimizer_state_by_name(one, models[0].named_parameters()), tmp_path)
    load_optimizer_state_by_name(other, models[1].named_parameters(), tree)
    for model, optimizer in zip(models, (one, other), strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.3)
        optimizer.step()
    assert_same(dict(models[1].state_dict()), dict(models[0].state_dict()))
    step, other_step = (opt.state[m[0].weight]["step"] for opt, m in zip((one, other), models, strict=True))
    assert (step.device, step.dtype) == (other_step.device, other_step.dtype)


def refused(optimizer: Optimizer, model: nn.Module, tree: Any) -> str:
    before = optimizer_state_by_name(optimizer, model.named_parameters())
    kept = copy.deepcopy(before)
    with pytest.raises(PacelineError) as caught:
        load_optimizer_state_by_name(optimizer, model.named_parameters(), tree)
    assert caught.value.code == "PL511"
    assert_same(optimizer_state_by_name(optimizer, model.named_parameters()), kept)
    return caught.value.saw


def test_state_of_another_model_is_refused_with_names() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    take_step(model, optimizer, 0)
    tree = optimizer_state_by_name(optimizer, model.named_parameters())
    bigger = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3), nn.Linear(3, 1))
    saw = refused(torch.optim.AdamW(bigger.parameters()), bigger, tree)
    assert "it lacks 4.bias, 4.weight" in saw
    assert "it has frozen, which are not trained here" in saw
    assert "0.weight ([8, 5] there, [9, 5] here)" in saw
    saw = refused(torch.optim.SGD(model.parameters()), model, tree)
    assert "it is of the optimizer AdamW, and this one is SGD" in saw


def test_groups_that_can_not_be_merged_are_refused() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(named_groups(model, 0))
    tree = optimizer_state_by_name(optimizer, model.named_parameters())
    merged = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    saw = refused(merged, model, tree)
    assert "0.weight and 0.bias are in one group here" in saw
    assert "weight_decay" in saw


def test_a_parameter_without_a_name_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(7))])
    with pytest.raises(PacelineError, match=r"group 0, parameter 7 of shape \[7\]"):
        optimizer_state_by_name(optimizer, model.named_parameters())
