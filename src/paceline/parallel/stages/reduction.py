"""Sums the gradients of a stage: over its microbatches in the order of the tree, then over the data ranks.

Gradients are set aside per microbatch, as without pp (`parallel/exact.py`). Backwards may come in any order.
Which parameters got a gradient travels with the sums, as one number per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.exchange import Exchange, MessageExchange
from paceline.comm.shared_memory import SharedMemoryExchange
from paceline.comm.tree import TreeSum, plan_reduction
from paceline.parallel.exact import Gradients, add_gradients, nothing_like


class StageReduction:
    """The gradients of the parameters that one stage adds up.

    Args:
        parameters: to train; those that this stage is the first to use.
        exchange: over the data ranks; `None` for one.
        rank: of this process among them.
    """

    def __init__(self, parameters: Sequence[Tensor], exchange: Exchange | None, rank: int) -> None:
        self._parameters = list(parameters)
        self._exchange = exchange
        self._rank = rank
        self._num_owned: tuple[int, ...] = ()
        self._waiting: dict[int, Gradients] = {}
        self._next = 0
        self._sum: TreeSum[Gradients] = TreeSum(0, add_gradients)

    def begin(self, num_owned: tuple[int, ...]) -> None:
        """Start a global batch.

        Args:
            num_owned: per data rank, the number of microbatches that it computes.
        """
        self._num_owned = num_owned
        self._next = sum(num_owned[: self._rank])
        self._waiting = {}
        self._sum = TreeSum(sum(num_owned), add_gradients)

    def set_aside(self, index: int) -> None:
        """Move the gradients of a microbatch, by its number in the global batch, to the sum."""
        if not self._parameters:
            return
        self._waiting[index] = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        with torch.no_grad():
            while self._next in self._waiting:
                self._sum.push((self._next, self._next + 1), self._waiting.pop(self._next))
                self._next += 1

    @torch.no_grad()
    def end(self) -> None:
        """Put the sums into the parameters; collective over the data ranks."""
        subtrees, self._sum = self._sum.subtrees, TreeSum(0, add_gradients)
        if not self._parameters:
            return
        total: Gradients = [None] * len(self._parameters)
        if self._exchange is None:
            if subtrees:
                [(_, total)] = subtrees
        elif sum(self._num_owned):
            total = self._sum_over_ranks([gradients for _, gradients in subtrees])
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient

    def _sum_over_ranks(self, own: list[Gradients]) -> Gradients:
        assert self._exchange is not None
        plan = plan_reduction(self._num_owned)
        found: Gradients = [None] * len(self._parameters)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, parameter in enumerate(self._parameters):
            by_dtype.setdefault(parameter.dtype, []).append(place)
        for dtype, places in by_dtype.items():
            like = [self._parameters[place] for place in places]
            lengths = [p.numel() for p in like]
            total = torch.empty(sum(lengths) + len(places), dtype=dtype, device=like[0].device)
            flat = [[_flatten([gradients[place] for place in places], like)] for gradients in own]
            self._exchange.sum_subtrees(flat, plan, total)
            parts = torch.split(total[: sum(lengths)], lengths)
            used = total[sum(lengths) :].tolist()
            for place, part, count in zip(places, parts, used, strict=True):
                if count:
                    found[place] = _view_as(part, self._parameters[place])
        return found


def build_exchange(group: dist.ProcessGroup, device: torch.device) -> Exchange:
    """Return the way to sum over the ranks of a group; collective."""
    return SharedMemoryExchange(group) if device.type == "cpu" else MessageExchange(group, device)


def _flatten(gradients: Gradients, like: list[Tensor]) -> Tensor:
    parts = [
        (nothing_like(p) if g is None else g).permute(_memory_order(p)).reshape(-1)
        for g, p in zip(gradients, like, strict=True)
    ]
    used = torch.tensor(
        [float(g is not None) for g in gradients], dtype=parts[0].dtype, device=parts[0].device
    )
    return torch.cat([*parts, used])


def _view_as(part: Tensor, like: Tensor) -> Tensor:
    order = _memory_order(like)
    whole = part.view([like.shape[dim] for dim in order])
    return whole.permute([order.index(dim) for dim in range(like.dim())])


def _memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions from the slowest to the fastest in memory."""
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim))
