"""Sums the gradients of a rank's experts: over the microbatches that sent tokens, then over copies.

The ranks of ep run their microbatches in rounds. In each round, a rank's experts get tokens of one microbatch
of each rank of ep, the source of these tokens. Under pp several rounds are under way at a time.

The gradients of a round are complete: they are not summed over ep. Only the ranks that hold the same experts
(every ep-th data rank) add theirs.

- `OrderedExpertSum` keeps the gradient of each microbatch apart and adds them in the order of the tree
  (`comm/tree.py`), so that the sum has the bits of one process.
- `QuickExpertSum` lets backward add them, and sums copies by an all-reduce.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.exchange import Exchange, nothing_like
from paceline.comm.tree import TreeSum, plan_reduction
from paceline.mesh import Axis
from paceline.parallel.exact import Gradients, add_gradients


class ExpertSum(ABC):
    """The gradients of the experts that a rank holds.

    Args:
        parameters: this rank's parts.
        axis: the ranks of ep with tokens of other microbatches.
        copies: the ranks that hold the same experts.

    Attributes:
        used: by id of a parameter, whether a microbatch of these ranks has used it in the last step.

    Usage per step: `begin`; per round, `use` in forwards and `end_round` after backward; `end`.
    """

    def __init__(self, parameters: Sequence[Tensor], axis: Axis, copies: Axis) -> None:
        self._parameters = list(parameters)
        self._axis = axis
        self._copies = copies
        self._num_owned: tuple[int, ...] = ()
        self.used: dict[int, bool] = {}

    def begin(self, num_owned: tuple[int, ...]) -> None:
        """Start a global batch.

        Args:
            num_owned: per data rank, the number of microbatches that it computes.
        """
        self._num_owned = num_owned

    @abstractmethod
    def use(self, parameter: Tensor, place: int, number: int) -> Tensor:
        """Return a parameter for a product with rows from one source.

        Args:
            parameter: this rank's part.
            place: of the source in ep.
            number: of the round.
        """

    @abstractmethod
    def end_round(self, number: int, microbatches: Sequence[int | None]) -> None:
        """End a round after its backward.

        Args:
            number: of the round.
            microbatches: per rank of ep, the number of the microbatch that it ran, or `None`.
        """

    @abstractmethod
    def end(self) -> None:
        """Put the sums into the parameters; collective over the copies."""

    def list_sources(self) -> range:
        """Return the data ranks that share one copy of the experts with this rank."""
        start = self._copies.rank * self._axis.size
        return range(start, start + self._axis.size)


class OrderedExpertSum(ExpertSum):
    """A sum in the order of the tree over the microbatches of the global batch.

    Memory: per rank of ep up to log2(microbatches of a rank) + 1 gradients of this rank's experts. That is
    as much as an exact reduction of all experts takes without ep.

    Args:
        parameters, axis, copies: as for `ExpertSum`.
        exchange: over the copies; `None` for one.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        axis: Axis,
        copies: Axis,
        exchange: Exchange | None,
    ) -> None:
        super().__init__(parameters, axis, copies)
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._exchange = exchange
        # By round and place of the source, while the round is under way; then by place and microbatch.
        self._kept: dict[tuple[int, int], Gradients] = {}
        self._waiting: list[dict[int, Gradients]] = []
        self._next: list[int] = []
        self._sums: list[TreeSum[Gradients]] = []

    def begin(self, num_owned: tuple[int, ...]) -> None:
        super().begin(num_owned)
        self._sums = [TreeSum(sum(num_owned), add_gradients) for _ in range(self._axis.size)]
        self._next = [sum(num_owned[:source]) for source in self.list_sources()]
        self._kept, self._waiting = {}, [{} for _ in range(self._axis.size)]

    def use(self, parameter: Tensor, place: int, number: int) -> Tensor:
        leaf: Tensor = _Leaf.apply(parameter, self, place, number)  # type: ignore[no-untyped-call]
        return leaf

    def keep(self, parameter: int, place: int, number: int, gradient: Tensor) -> None:
        """Keep the gradient of a microbatch; a second use of the same parameter adds to it."""
        kept = self._kept.setdefault((number, place), [None] * len(self._parameters))
        before = kept[parameter]
        kept[parameter] = gradient if before is None else before + gradient

    @torch.no_grad()
    def end_round(self, number: int, microbatches: Sequence[int | None]) -> None:
        for place, index in enumerate(microbatches):
            gradients = self._kept.pop((number, place), [None] * len(self._parameters))
            if index is None:
                continue
            waiting = self._waiting[place]
            waiting[index] = gradients
            while (following := self._next[place]) in waiting:
                self._sums[place].push((following, following + 1), waiting.pop(following))
                self._next[place] += 1

    @torch.no_grad()
    def end(self) -> None:
        num_leaves = sum(self._num_owned)
        joined: TreeSum[Gradients] = TreeSum(num_leaves, add_gradients)
        for total in self._sums:  # the ranks of ep have consecutive microbatches
            for subtree, gradients in total.subtrees:
                joined.push(subtree, gradients)
        self._sums = []
        if not num_leaves:
            return
        own = [gradients for _, gradients in joined.subtrees]
        self.used = {
            id(parameter): any(gradients[place] is not None for gradients in own)
            for place, parameter in enumerate(self._parameters)
        }
        if self._exchange is None:
            [found] = own
        else:
            found = self._sum_copies(own, self._exchange)
        for parameter, gradient in zip(self._parameters, found, strict=True):
            parameter.grad = gradient

    def _sum_copies(self, own: list[Gradients], exchange: Exchange) -> Gradients:
        size = self._axis.size
        starts = range(0, len(self._num_owned), size)
        plan = plan_reduction(tuple(sum(self._num_owned[start : start + size]) for start in starts))
        found: Gradients = []
        for place, parameter in enumerate(self._parameters):
            flat = [[_flatten(gradients[place], parameter)] for gradients in own]
            total = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            exchange.sum_subtrees(flat, plan, total)
            found.append(total.view(parameter.shape))
        return found

    def find_number(self, parameter: Tensor) -> int:
        """Return the number of a parameter."""
        return self._numbers[id(parameter)]


class QuickExpertSum(ExpertSum):
    """A sum in the order in which backward adds, then over the copies by an all-reduce."""

    def use(self, parameter: Tensor, place: int, number: int) -> Tensor:
        return parameter

    def end_round(self, number: int, microbatches: Sequence[int | None]) -> None:
        """Do nothing: backward has added the gradients."""

    @torch.no_grad()
    def end(self) -> None:
        self.used = {id(parameter): parameter.grad is not None for parameter in self._parameters}
        if not sum(self._num_owned) or self._copies.size == 1:
            return
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self._copies.group)


def _flatten(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return (nothing_like(parameter) if gradient is None else gradient).reshape(-1)


class _Leaf(torch.autograd.Function):
    """A parameter whose gradient goes to an `OrderedExpertSum` instead of the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: OrderedExpertSum, place: int, number: int) -> Tensor:
        ctx.total, ctx.given = total, (total.find_number(parameter), place, number)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.total.keep(*ctx.given, gradient.contiguous())
        return None, None, None, None
