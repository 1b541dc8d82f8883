"""Sums the gradients of a rank's experts: over the microbatches that sent tokens, then over copies.

The ranks of ep run their microbatches in rounds. In each round, a rank's experts get tokens of one microbatch
of each rank of ep, the source of these tokens. Under pp several rounds are under way at a time.

The gradients of a round are complete: they are not summed over ep. Only the ranks that hold the same experts
(every ep-th data rank) add theirs. An exact sum keeps the gradient of each microbatch apart and adds them in
the order of the tree, so that it has the bits of one process. A fast one lets backward add them.

Memory, exact: per rank of ep up to log2(microbatches of a rank) + 1 gradients of this rank's experts. That is
as much as an exact reduction of all experts takes without ep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.mesh import Axis
from paceline.parallel.sums.gradient_sum import GradientSum, RankSum
from paceline.parallel.sums.gradients import Gradients, flatten, take_gradients, view_as


class ExpertSum:
    """The gradients of the experts that a rank holds.

    Args:
        axis: the ranks of ep with tokens of other microbatches.
        copies: the ranks that hold the same experts.
        ranks: sums over the copies.

    Usage per step: `begin`; per round, `use` in forwards and `end_round` after backward; `end`.
    """

    def __init__(self, parameters: Sequence[Tensor], axis: Axis, copies: Axis, ranks: RankSum) -> None:
        self._parameters = list(parameters)
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._axis = axis
        self._copies = copies
        self._is_exact = ranks.is_exact
        self._sum = GradientSum(ranks, self._pack)
        # By round and place of the source, while the round is under way.
        self._kept: dict[tuple[int, int], Gradients] = {}
        self._num_leaves = 0

    def begin(self, num_owned: tuple[int, ...]) -> None:
        """Start a global batch.

        Args:
            num_owned: per data rank, the number of microbatches that it computes.
        """
        size = self._axis.size
        starts = range(0, len(num_owned), size)  # the ranks of ep have consecutive microbatches
        self._num_leaves = sum(num_owned)
        self._sum.begin(tuple(sum(num_owned[start : start + size]) for start in starts))
        self._kept = {}

    def use(self, parameter: Tensor, place: int, number: int) -> Tensor:
        """Return a parameter for a product with rows from one source."""
        if not self._is_exact:
            return parameter
        leaf: Tensor = _Leaf.apply(parameter, self, place, number)  # type: ignore[no-untyped-call]
        return leaf

    def keep(self, parameter: Tensor, place: int, number: int, gradient: Tensor) -> None:
        """Keep the gradient of a microbatch; a second use of the same parameter adds to it."""
        kept = self._kept.setdefault((number, place), [None] * len(self._parameters))
        at = self._numbers[id(parameter)]
        before = kept[at]
        kept[at] = gradient if before is None else before + gradient

    @torch.no_grad()
    def end_round(self, number: int, microbatches: Sequence[int | None]) -> None:
        """End a round after its backward.

        Args:
            microbatches: per rank of ep, the number of the microbatch that it ran, or `None`.
        """
        if not self._is_exact:
            return
        for place, index in enumerate(microbatches):
            gradients = self._kept.pop((number, place), [None] * len(self._parameters))
            if index is not None:
                self._sum.add(index, gradients)

    @torch.no_grad()
    def end(self) -> None:
        """Put the sums into the parameters; collective over the copies."""
        if not self._is_exact:
            self._sum.add(-1, take_gradients(self._parameters))
        none: Gradients = [None] * len(self._parameters)
        if not self._num_leaves:
            return
        if self._copies.size == 1:
            [found] = self._sum.take()
        else:
            vectors = self._sum.finish(none)
            found = [view_as(vector, p) for vector, p in zip(vectors, self._parameters, strict=True)]
        for parameter, gradient in zip(self._parameters, found or none, strict=True):
            parameter.grad = gradient

    def _pack(self, gradients: Gradients) -> list[Tensor]:
        """Return a vector per parameter."""
        return [flatten(each, p) for each, p in zip(gradients, self._parameters, strict=True)]


class _Leaf(torch.autograd.Function):
    """A parameter whose gradient goes to an `ExpertSum` instead of the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: ExpertSum, place: int, number: int) -> Tensor:
        ctx.total, ctx.parameter, ctx.given = total, parameter, (place, number)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.total.keep(ctx.parameter, *ctx.given, gradient.contiguous())
        return None, None, None, None
