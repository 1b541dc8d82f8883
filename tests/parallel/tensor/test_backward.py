"""A plan of tp whose gradients would be wrong is found before training, and a right one is not blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.tensor import split_plan as planning
from paceline.parallel.tensor.backward import BackwardCheck
from paceline.parallel.tensor.flow import Flow
from paceline.parallel.tensor.split_plan import find_plan
from paceline.parallel.tensor.trace import Ref
from paceline.torch_seams.trees import tree_map_only


class Attention(nn.Module):
    """Adds a bias of fixed size per head to the scores, so heads stay whole, and returns the weights too."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width // heads)
        self.heads = heads

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        scores = (self.norm(q) if bias is None else q) @ k.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        weights = scores.softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), weights


class Model(nn.Module):
    def __init__(self, *, has_bias: bool) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.has_bias = has_bias

    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.arange(1, 5).view(4, 1, 1) * 0.1 if self.has_bias else None
        x = x + self.first(x, slopes)[0]
        x = x + self.second(x, slopes)[0]
        return x + self.down(self.up(x).relu())


def _swap(args: Any, new: int, old: int) -> Any:
    return tree_map_only(Ref, lambda ref: Ref(old) if ref.number == new else ref, args)


def list_checks(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> list[Any]:
    """Plan a model for tp=2 and return the checks that were made, with the plan's flow."""
    checks: list[Any] = []

    class Kept(BackwardCheck):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            checks.append(given)

    monkeypatch.setattr(planning, "BackwardCheck", Kept)
    find_plan(model, lambda module: module(torch.randn(2, 6, 16)), 2)
    return checks


def test_widths_of_heads_are_not_cut_where_the_weights_could_not_get_their_gradient() -> None:
    plan = find_plan(Model(has_bias=True), lambda module: module(torch.randn(2, 6, 16)), 2)
    assert sorted(plan.splits) == ["down.weight", "up.bias", "up.weight"]


def test_the_check_finds_a_cut_whose_gradient_is_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that places the missing entry at the output of the module that uses the tensor itself."""
    place = Flow._place

    def wrong(self: Flow, tensor: int, entering: list[int]) -> Any:
        try:
            return place(self, tensor, entering)
        except planning.UnreachableError:
            return []

    monkeypatch.setattr(Flow, "_place", wrong)
    plan = find_plan(Model(has_bias=True), lambda module: module(torch.randn(2, 6, 16)), 2)
    assert "first.qkv.weight" not in plan.splits
    assert any("would be wrong" in reason for reason in plan.whole.values())


def test_every_entry_and_every_summed_parameter_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    flow, trace, parts, pairs = list_checks(monkeypatch, Model(has_bias=False))[-1]
    assert BackwardCheck(flow, trace, parts, pairs).find_wrong() is None
    assert parts.replaced
    assert flow.partial == {f"{m}.norm.{p}" for m in ("first", "second") for p in ("weight", "bias")}
    for new, old in parts.replaced.items():
        ops = [replace(op, args=_swap(op.args, new, old)) for op in parts.ops]
        others = {each: number for each, number in parts.replaced.items() if each != new}
        without = replace(parts, ops=ops, replaced=others)
        assert BackwardCheck(flow, trace, without, pairs).find_wrong() is not None
    for name in sorted(flow.partial):
        flow.partial.remove(name)
        wrong = BackwardCheck(flow, trace, parts, pairs).find_wrong()
        assert wrong is not None
        assert name in wrong[1]
        flow.partial.add(name)
