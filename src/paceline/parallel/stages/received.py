"""Passes received tensors to a stage, and keeps their gradients for the stage that sent them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.tree_exchange import nothing_like
from paceline.parallel.stages.record import LearnedTensor, Made


@dataclass
class ReceivedGradient:
    """The gradient of a received tensor, once backward has computed it."""

    received: Tensor
    value: Tensor | None = None

    def read(self) -> Tensor:
        """Return it; where nothing flows back, numbers that change no sum."""
        return nothing_like(self.received) if self.value is None else self.value


class _Door(torch.autograd.Function):
    """An identity that passes a received tensor to the model, and keeps its gradient.

    The gradient of a leaf could get other strides than in one process, where there is no leaf; kernels may
    add in another order then.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: ReceivedGradient) -> Tensor:
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.kept.value = gradients[0]
        return None, None


def receive(
    crossing: list[LearnedTensor], tensors: list[Tensor] | None = None
) -> tuple[dict[Made, Tensor], list[ReceivedGradient]]:
    """Return what a stage gets, by name, and the gradients of those that need one.

    Args:
        crossing: of the cut before the stage.
        tensors: received for it; `None` for the first stage.
    """
    received: dict[Made, Tensor] = {}
    gradients: list[ReceivedGradient] = []
    for each, tensor in zip(crossing, tensors or [], strict=True):
        if each.needs_grad and torch.is_grad_enabled():
            gradients.append(ReceivedGradient(tensor))
            tensor = _Door.apply(tensor.requires_grad_(), gradients[-1])  # type: ignore[no-untyped-call]
        received[each.made] = tensor
    return received, gradients
