"""Muon for a model whose experts are stacks of matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_STATE = "momentum_buffer"


class StackedMuon(torch.optim.Muon):
    """torch's Muon, which steps each matrix of a parameter of more than two dimensions by itself.

    Args:
        parameters: of at least two dimensions; at least one is a matrix.
    """

    def __init__(self, parameters: list[nn.Parameter], **options: Any) -> None:
        super().__init__([p for p in parameters if p.dim() == 2], **options)
        if stacks := [p for p in parameters if p.dim() > 2]:
            self.add_param_group({"params": stacks})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all matrices."""
        kept = [group["params"] for group in self.param_groups]
        made: list[nn.Parameter] = []
        for group, parameters in zip(self.param_groups, kept, strict=True):
            group["params"] = []
            for parameter in parameters:
                if parameter.dim() == 2 or parameter.grad is None:
                    group["params"].append(parameter)
                    continue
                state = self.state[parameter]
                if _STATE not in state:
                    state[_STATE] = torch.zeros_like(parameter.grad, memory_format=torch.contiguous_format)
                stacks = (parameter.detach(), parameter.grad, state[_STATE])
                for value, gradient, momentum in zip(*map(_list_matrices, stacks), strict=True):
                    matrix = nn.Parameter(value)
                    matrix.grad = gradient
                    self.state[matrix] = {_STATE: momentum}
                    made.append(matrix)
                    group["params"].append(matrix)
        try:
            super().step()  # type: ignore[no-untyped-call]
        finally:
            for group, parameters in zip(self.param_groups, kept, strict=True):
                group["params"] = parameters
            for matrix in made:
                del self.state[matrix]


def _list_matrices(stack: Tensor) -> list[Tensor]:
    return list(stack.flatten(0, -3).unbind())
