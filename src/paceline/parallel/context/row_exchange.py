"""Collectives between the ranks of cp, as functions that autograd can differentiate.

Between the blocks each rank has some positions of a sequence (rows, see `division.py`). Inside an attention
by heads, each rank has all positions of some heads.

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

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.parallel.context.division import Division
from paceline.parallel.context.refusals import too_short_error
from paceline.parallel.split import Split
from paceline.parallel.tensor.differentiable import differentiate, seen_by_modes
from paceline.torch_seams.tensors import is_fake

log = logging.getLogger(__name__)


class Rows:
    """The rows of a stretch of blocks: how the sequence of the forward that runs now is divided.

    Args:
        axis: cp.
        is_causal: whether an attention by rows in the stretch is causal; then rows are in zigzag where the
            length allows it.

    Attributes:
        axis: cp.
        division: the rows of each rank.
    """

    def __init__(self, axis: Axis, *, is_causal: bool = False) -> None:
        self.axis = axis
        self.division = Division()
        self._is_causal = is_causal
        self._has_logged = False

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of rows of each rank."""
        return self.division.counts

    @property
    def whole(self) -> int:
        """The length of the whole sequence."""
        return self.division.length

    @property
    def own(self) -> int:
        """The number of rows that this rank has."""
        return self.division.counts[self.axis.rank]

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's rows of a whole tensor; no autograd between ranks."""
        return self.division.take(tensor, dim, self.axis.rank)

    def divide(self, length: int) -> None:
        """Divide the sequence of a forward."""
        if length < self.axis.size:
            raise too_short_error(length, self.axis.size)
        self.division = Division.of(length, self.axis.size, zigzag=self._is_causal)
        if self._is_causal and not self.division.is_zigzag and not self._has_logged:
            self._has_logged = True
            log.info(
                "cp: zigzag is off for sequences of %d positions, because 2 x cp = %d does not divide them: "
                "each rank has consecutive positions, and causal attention takes longer",
                length,
                2 * self.axis.size,
            )

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


@seen_by_modes
def take_rows(tensor: Tensor, dim: int, rows: Rows) -> Tensor:
    """Return this rank's rows of a tensor that all ranks have whole."""
    rows.divide(tensor.shape[dim])
    return differentiate(_own_rows, all_gather_rows, tensor, dim, rows.division, rows.axis)


@seen_by_modes
def cut_rows(tensor: Tensor, dim: int, rows: Rows) -> Tensor:
    """Return this rank's rows of a tensor that all ranks have computed whole, inside of a stretch."""
    rows.check(tensor, dim, rows.whole)
    return differentiate(_own_rows, all_gather_rows, tensor, dim, rows.division, rows.axis)


@seen_by_modes
def join_rows(tensor: Tensor, dim: int, rows: Rows) -> Tensor:
    """Return the whole tensor, with which all ranks then compute the same."""
    rows.check(tensor, dim, rows.own)
    return differentiate(all_gather_rows, _own_rows, tensor, dim, rows.division, rows.axis)


@seen_by_modes
def to_heads(tensor: Tensor, dim: int, split: Split, rows: Rows) -> Tensor:
    """Return all rows of this rank's heads, from this rank's rows of all heads.

    Args:
        tensor: its dimension `dim` holds the rows.
        dim: of the rows.
        split: the dimension of the heads, and how it is cut.
    """
    rows.check(tensor, dim, rows.own)
    return differentiate(_exchange_to_heads, _exchange_to_rows, tensor, dim, split, rows.counts, rows.axis)


@seen_by_modes
def to_rows(tensor: Tensor, dim: int, split: Split, rows: Rows) -> Tensor:
    """Return this rank's rows of all heads, from all rows of this rank's heads; the inverse of `to_heads`."""
    rows.check(tensor, dim, rows.whole)
    return differentiate(_exchange_to_rows, _exchange_to_heads, tensor, dim, split, rows.counts, rows.axis)


def _own_rows(tensor: Tensor, dim: int, division: Division, axis: Axis) -> Tensor:
    own = division.take(tensor, dim, axis.rank)
    return own.contiguous() if division.is_zigzag else own.clone(memory_format=torch.contiguous_format)


def all_gather_rows(tensor: Tensor, dim: int, division: Division, axis: Axis) -> Tensor:
    """Return the rows of all ranks in the order of their positions; no autograd."""
    parts = []
    for count in division.counts:
        shape = list(tensor.shape)
        shape[dim] = count
        parts.append(tensor.new_empty(shape))
    if is_fake(tensor):
        return division.join(parts, dim)
    if len(set(division.counts)) == 1:
        dist.all_gather(parts, tensor.contiguous(), group=axis.group)
    else:
        exchange_messages(parts, [tensor.contiguous()] * axis.size, axis)
    return division.join(parts, dim)


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
