"""Collectives between the ranks of cp, as functions that autograd can differentiate.

Between the blocks each rank has consecutive positions of a sequence (rows); inside an attention each rank has
all positions of some heads.

| function       | forward                           | backward                          |
|----------------|-----------------------------------|-----------------------------------|
| `take_rows`    | this rank's rows                  | all-gather                        |
| `cut_rows`     | this rank's rows                  | all-gather                        |
| `join_rows`    | all-gather                        | this rank's rows                  |
| `to_heads`     | all-to-all: rows become heads     | all-to-all: heads become rows     |
| `to_rows`      | all-to-all: heads become rows     | all-to-all: rows become heads     |

`to_heads` and `to_rows` are those of Ulysses (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3). With A the
bytes of a whole tensor and n the ranks, each sends (n-1)/n x A/n bytes per exchange. Ranks may have different
numbers of rows. All ranks of the axis must call these functions in the same order.

Modes for functions of torch see them like torch's own. On tensors without numbers they return shapes and
communicate nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import has_torch_function_unary

from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.parallel.context.errors import too_short_error
from paceline.parallel.split import Split
from paceline.parallel.tensor.collectives import refuse_graph, show
from paceline.torch_seams.tensors import is_fake


def count_rows(length: int, num_ranks: int) -> tuple[int, ...]:
    """Return how many positions each rank has; if the length does not divide, the first have one more."""
    low, more = divmod(length, num_ranks)
    return tuple(low + (rank < more) for rank in range(num_ranks))


class Rows:
    """The rows of a stretch of blocks: how the sequence of the forward that runs now is divided.

    Attributes:
        axis: cp.
        counts: the rows of each rank.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.counts: tuple[int, ...] = ()

    @property
    def whole(self) -> int:
        """The length of the whole sequence."""
        return sum(self.counts)

    @property
    def own(self) -> int:
        """The number of rows that this rank has."""
        return self.counts[self.axis.rank]

    @property
    def start(self) -> int:
        """The position of this rank's first row."""
        return sum(self.counts[: self.axis.rank])

    def divide(self, length: int) -> None:
        """Divide the sequence of a forward.

        Raises:
            PacelineError: PL631 for fewer positions than ranks.
        """
        if length < self.axis.size:
            raise too_short_error(length, self.axis.size)
        self.counts = count_rows(length, self.axis.size)

    def check(self, tensor: Tensor, dim: int, expected: int) -> None:
        """Raise PL631 unless a tensor has the expected length."""
        if tensor.shape[dim] != expected:
            raise PacelineError(
                "PL631",
                saw=f"a tensor {list(tensor.shape)} where cp={self.axis.size} expects a length of {expected} "
                f"in dimension {dim}.",
                rule="Inside the blocks that cp divides, a sequence keeps the length that it enters with.",
                fix="Pass an example batch of the same form as the training batches, or set cp=1.",
            )


def take_rows(tensor: Tensor, dim: int, rows: Rows) -> Tensor:
    """Return this rank's rows of a tensor that all ranks have whole."""
    if has_torch_function_unary(tensor):
        return show(take_rows, tensor, dim, rows)
    rows.divide(tensor.shape[dim])
    result: Tensor = _DivideRows.apply(tensor, dim, rows.counts, rows.axis)  # type: ignore[no-untyped-call]
    return result


def cut_rows(tensor: Tensor, dim: int, rows: Rows) -> Tensor:
    """Return this rank's rows of a tensor that all ranks have computed whole, inside of a stretch."""
    if has_torch_function_unary(tensor):
        return show(cut_rows, tensor, dim, rows)
    rows.check(tensor, dim, rows.whole)
    result: Tensor = _DivideRows.apply(tensor, dim, rows.counts, rows.axis)  # type: ignore[no-untyped-call]
    return result


def join_rows(tensor: Tensor, dim: int, rows: Rows) -> Tensor:
    """Return the whole tensor, with which all ranks then compute the same."""
    if has_torch_function_unary(tensor):
        return show(join_rows, tensor, dim, rows)
    rows.check(tensor, dim, rows.own)
    result: Tensor = _JoinDivided.apply(tensor, dim, rows.counts, rows.axis)  # type: ignore[no-untyped-call]
    return result


def to_heads(tensor: Tensor, dim: int, split: Split, rows: Rows) -> Tensor:
    """Return all rows of this rank's heads, from this rank's rows of all heads.

    Args:
        tensor: its dimension `dim` holds the rows.
        dim: of the rows.
        split: the dimension of the heads, and how it is cut.
        rows: of the stretch.
    """
    if has_torch_function_unary(tensor):
        return show(to_heads, tensor, dim, split, rows)
    rows.check(tensor, dim, rows.own)
    result: Tensor = _ToHeads.apply(tensor, dim, split, rows.counts, rows.axis)  # type: ignore[no-untyped-call]
    return result


def to_rows(tensor: Tensor, dim: int, split: Split, rows: Rows) -> Tensor:
    """Return this rank's rows of all heads, from all rows of this rank's heads; the inverse of `to_heads`."""
    if has_torch_function_unary(tensor):
        return show(to_rows, tensor, dim, split, rows)
    rows.check(tensor, dim, rows.whole)
    result: Tensor = _ToRows.apply(tensor, dim, split, rows.counts, rows.axis)  # type: ignore[no-untyped-call]
    return result


def _own_rows(tensor: Tensor, dim: int, counts: tuple[int, ...], axis: Axis) -> Tensor:
    own = tensor.narrow(dim, sum(counts[: axis.rank]), counts[axis.rank])
    return own.clone(memory_format=torch.contiguous_format)


def all_gather_rows(tensor: Tensor, dim: int, counts: tuple[int, ...], axis: Axis) -> Tensor:
    """Return the rows of all ranks, which have `counts` of them; no autograd."""
    parts = []
    for count in counts:
        shape = list(tensor.shape)
        shape[dim] = count
        parts.append(tensor.new_empty(shape))
    if is_fake(tensor):
        return torch.cat(parts, dim)
    if len(set(counts)) == 1:
        dist.all_gather(parts, tensor.contiguous(), group=axis.group)
    else:
        exchange_messages(parts, [tensor.contiguous()] * axis.size, axis)
    return torch.cat(parts, dim)


def _exchange_to_heads(tensor: Tensor, dim: int, split: Split, counts: tuple[int, ...], axis: Axis) -> Tensor:
    sent = [split.take(tensor, rank) for rank in range(axis.size)]
    received = []
    for count in counts:
        shape = list(sent[0].shape)
        shape[dim] = count
        received.append(tensor.new_empty(shape))
    exchange_messages(received, sent, axis)
    return torch.cat(received, dim)


def _exchange_to_rows(tensor: Tensor, dim: int, split: Split, counts: tuple[int, ...], axis: Axis) -> Tensor:
    sent = [part.contiguous() for part in torch.split(tensor, list(counts), dim)]
    received = [torch.empty_like(sent[axis.rank]) for _ in counts]
    exchange_messages(received, sent, axis)
    return split.join(received)


def exchange_messages(received: list[Tensor], sent: list[Tensor], axis: Axis) -> None:
    """Send a tensor to every rank and receive one from each, in one message per pair of ranks."""
    if is_fake(sent[0]):
        return
    flat = torch.cat([part.reshape(-1) for part in sent])
    into = flat.new_empty(sum(part.numel() for part in received))
    sizes = [part.numel() for part in received]
    dist.all_to_all_single(into, flat, sizes, [part.numel() for part in sent], group=axis.group)
    for part, piece in zip(received, torch.split(into, sizes), strict=True):
        part.copy_(piece.view_as(part))


class _DivideRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, counts: tuple[int, ...], axis: Axis) -> Tensor:
        ctx.given = dim, counts, axis
        return _own_rows(tensor, dim, counts, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        return all_gather_rows(grad, *ctx.given), None, None, None


class _JoinDivided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, counts: tuple[int, ...], axis: Axis) -> Tensor:
        ctx.given = dim, counts, axis
        return all_gather_rows(tensor, dim, counts, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        return _own_rows(grad, *ctx.given), None, None, None


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, split: Split, counts: tuple[int, ...], axis: Axis
    ) -> Tensor:
        ctx.given = dim, split, counts, axis
        return _exchange_to_heads(tensor, dim, split, counts, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        return _exchange_to_rows(grad, *ctx.given), None, None, None, None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, split: Split, counts: tuple[int, ...], axis: Axis
    ) -> Tensor:
        ctx.given = dim, split, counts, axis
        return _exchange_to_rows(tensor, dim, split, counts, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        return _exchange_to_heads(grad, *ctx.given), None, None, None, None
