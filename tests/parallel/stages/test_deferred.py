"""A backward in two halves gives every bit of one backward, and really computes weights in the second."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.stages.deferred import WeightGradients, deferring, list_deferrable
from paceline.parallel.stages.record import record_forward


class Mixed(nn.Module):
    """Layers that can be divided, and others: a subclass, a weight of two users, a change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Conv2d(1, 4, 3, padding=1)
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.again = nn.Linear(8, 8, bias=False)
        self.own = type("OwnLinear", (nn.Linear,), {})(8, 8)
        self.twice = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.idle = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(self.picture(x).movedim(1, -1)), inplace=True)
        for _ in range(3):
            h = self.again(self.norm(h))
        h = self.own(h) + self.twice(h) @ self.twice.weight
        return self.frozen(h)


def run(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        found: Tensor = model(x)
    return found


def make(dtype: torch.dtype) -> tuple[Mixed, Tensor]:
    torch.manual_seed(0)
    kept = torch.float32 if dtype is torch.bfloat16 else dtype
    return Mixed().to(kept), torch.randn(3, 1, 5, 7, dtype=kept, requires_grad=True)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


DEFERRED = {"picture.weight", "picture.bias", "first.weight", "first.bias", "again.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_halves_have_the_bits_of_one_backward(dtype: torch.dtype) -> None:
    model, x = make(dtype)
    seen: list[int] = []
    model.first.weight.register_hook(lambda gradient: seen.append(gradient.numel()))
    model.again.register_full_backward_hook(lambda *_: seen.append(-1))
    run(model, x, dtype).square().sum().backward()
    expected, expected_input, hooks = gradients_of(model), x.grad, sorted(seen)
    model.zero_grad()
    x.grad = None
    seen.clear()

    record = record_forward(model, (), lambda: run(model, x.detach(), dtype), torch.device("cpu"))
    sink = WeightGradients(record.readers, ())
    with deferring(list_deferrable(model), lambda: sink):
        output = run(model, x, dtype)
    assert "forward" not in vars(model.first)
    output.square().sum().backward()
    first_half = gradients_of(model)
    assert {n for n, g in first_half.items() if g is None} == {*DEFERRED, *no_gradient(expected)}
    assert x.grad is not None
    assert expected_input is not None
    assert torch.equal(x.grad, expected_input)
    sink.compute()
    found = gradients_of(model)
    for name, gradient in expected.items():
        other = found[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            assert torch.equal(gradient, other), name
            assert gradient.stride() == other.stride(), name
    assert sorted(seen) == hooks


def no_gradient(gradients: dict[str, Tensor | None]) -> set[str]:
    return {name for name, gradient in gradients.items() if gradient is None}


def test_what_others_wait_for_stays_in_the_first_half() -> None:
    model, x = make(torch.float32)
    record = record_forward(model, (), lambda: model(x), torch.device("cpu"))
    sink = WeightGradients(record.readers, {id(model.again.weight)})
    with deferring(list_deferrable(model), lambda: sink):
        model(x).sum().backward()
    assert model.again.weight.grad is not None
    assert model.first.weight.grad is None


@pytest.mark.parametrize("change", [nn.init.zeros_, lambda weight: weight.mul_(2)])
def test_a_weight_that_changes_between_the_halves_is_an_error(change: Callable[[Tensor], object]) -> None:
    """Not the second half: this is autograd's own check of what it has saved."""
    model, x = make(torch.float32)
    record = record_forward(model, (), lambda: model(x), torch.device("cpu"))
    sink = WeightGradients(record.readers, ())
    with deferring(list_deferrable(model), lambda: sink):
        output = model(x)
    with torch.no_grad():
        change(model.first.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
