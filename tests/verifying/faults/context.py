"""Faults of context parallelism: in exchanges, masks, positions and sums among the ranks of cp."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from paceline.mesh import Axis
from paceline.models import gpt
from paceline.parallel.context import apply, gather, row_exchange
from paceline.parallel.context.division import Division
from paceline.parallel.dropout import replacements
from paceline.parallel.dropout.replacements import Cut
from paceline.parallel.placement import Placement
from paceline.parallel.split import Split
from paceline.train import tasks

Counts = tuple[int, ...]


def _to_heads(change: Callable[[Tensor, int, Counts], Tensor]) -> AbstractContextManager[Any]:
    """Change what a rank gets inside of attention: all rows of its heads."""
    right = row_exchange._exchange_to_heads

    def exchanged(tensor: Tensor, dim: int, split: Split, counts: Counts, axis: Axis) -> Tensor:
        return change(right(tensor, dim, split, counts, axis), dim, counts)

    return mock.patch.object(row_exchange, "_exchange_to_heads", exchanged)


def _to_rows(change: Callable[[Tensor, Split, Axis], Tensor]) -> AbstractContextManager[Any]:
    """Change what a rank gets behind attention: all heads of its rows."""
    right = row_exchange._exchange_to_rows

    def exchanged(tensor: Tensor, dim: int, split: Split, counts: Counts, axis: Axis) -> Tensor:
        return change(right(tensor, dim, split, counts, axis), split, axis)

    return mock.patch.object(row_exchange, "_exchange_to_rows", exchanged)


def _replacing(of: Any, *, run: Any = None, back: Any = None) -> AbstractContextManager[Any]:
    """Replace what a function of rows returns, or its gradient."""
    right = row_exchange.differentiate

    def differentiate(own: Any, gradient: Any, tensor: Tensor, *given: Any) -> Tensor:
        if own is of:
            own, gradient = run or own, back or gradient
        return right(own, gradient, tensor, *given)

    return mock.patch.object(row_exchange, "differentiate", differentiate)


def _weighing(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
    """Replace the causal mask [length, length] inside of attention."""
    right = replacements.weigh

    def weigh(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, *rest: Any) -> Tensor:
        if is_causal:
            kept = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
            bias = change(kept)
        return right(query, key, bias, False, *rest)

    return mock.patch.object(replacements, "weigh", weigh)


def _adding_up(change: Callable[[Placement, Any, Any], None]) -> AbstractContextManager[Any]:
    """Change how gradients of which ranks have addends are summed."""
    right = Placement.add_up_partial
    return mock.patch.object(
        Placement, "add_up_partial", lambda self, gradients: change(self, gradients, right)
    )


@contextlib.contextmanager
def positions_from_zero() -> Iterator[None]:
    """The positions of every rank's rows are counted from 0."""
    right = gpt.rotate

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = len(cos) // 2
        return right(x, *(torch.cat([angles[:half], angles[:half]]) for angles in (cos, sin)))

    with mock.patch.object(gpt, "rotate", rotate):
        yield


@contextlib.contextmanager
def mask_lost() -> Iterator[None]:
    """Attention has no mask: every position sees those behind it."""
    with _weighing(torch.ones_like):
        yield


@contextlib.contextmanager
def mask_rows_of_another_rank() -> Iterator[None]:
    """Each rank's rows have the rows of the mask of the other rank."""
    with _weighing(lambda kept: kept.roll(len(kept) // 2, 0)):
        yield


@contextlib.contextmanager
def heads_in_another_order() -> Iterator[None]:
    """Behind attention, heads are joined in another order than they were divided."""
    with _to_rows(lambda joined, split, axis: joined.roll(joined.shape[split.dim] // axis.size, split.dim)):
        yield


@contextlib.contextmanager
def heads_of_one_rank_twice() -> Iterator[None]:
    """Behind attention, the first rank's heads take the place of all others."""

    def change(joined: Tensor, split: Split, axis: Axis) -> Tensor:
        return split.join([split.take(joined, 0)] * axis.size)

    with _to_rows(change):
        yield


@contextlib.contextmanager
def rows_in_another_order() -> Iterator[None]:
    """Inside of attention, the ranks' rows are joined in another order."""
    with _to_heads(lambda joined, dim, counts: joined.roll(counts[0], dim)):
        yield


@contextlib.contextmanager
def keys_of_one_rank_twice() -> Iterator[None]:
    """Inside of attention, the first rank's keys take the place of the second's."""
    right, calls = row_exchange.differentiate, 0

    def twice(tensor: Tensor, dim: int, split: Split, counts: Counts, axis: Axis) -> Tensor:
        first = row_exchange._exchange_to_heads(tensor, dim, split, counts, axis).narrow(dim, 0, counts[0])
        return torch.cat([first] * len(counts), dim)

    def differentiate(run: Any, back: Any, tensor: Tensor, *given: Any) -> Tensor:
        nonlocal calls
        if run is row_exchange._exchange_to_heads:
            calls += 1
            run = twice if calls % 3 == 2 else run  # queries, keys, values
        return right(run, back, tensor, *given)

    with mock.patch.object(row_exchange, "differentiate", differentiate):
        yield


@contextlib.contextmanager
def rows_of_another_rank() -> Iterator[None]:
    """Before the first block, the ranks of cp take each other's rows."""
    right = row_exchange._own_rows

    def take(tensor: Tensor, dim: int, division: Division, axis: Axis) -> Tensor:
        return right(tensor, dim, division, replace(axis, rank=axis.size - 1 - axis.rank))

    with mock.patch.object(row_exchange, "_own_rows", take):
        yield


@contextlib.contextmanager
def rows_joined_in_another_order() -> Iterator[None]:
    """Behind the last block, the ranks' rows are joined in another order."""

    def join(tensor: Tensor, dim: int, division: Division, axis: Axis) -> Tensor:
        return row_exchange.all_gather_rows(tensor, dim, division, axis).roll(division.counts[0], dim)

    with _replacing(row_exchange.all_gather_rows, run=join):
        yield


@contextlib.contextmanager
def zigzag_not_undone() -> Iterator[None]:
    """Behind the last block, chunks in zigzag are joined as if each rank had consecutive positions."""

    def join(tensor: Tensor, dim: int, division: Division, axis: Axis) -> Tensor:
        return row_exchange.all_gather_rows(tensor, dim, Division(division.counts), axis)

    with _replacing(row_exchange.all_gather_rows, run=join):
        yield


@contextlib.contextmanager
def dropout_from_position_zero() -> Iterator[None]:
    """Every rank of cp drops what the first one drops."""
    right = apply._RowsCut.__call__

    def cut(self: apply._RowsCut) -> Cut:
        found = right(self)
        assert found.runs is not None
        ((_, number),) = found.runs
        return replace(found, runs=((0, number),))

    with mock.patch.object(apply._RowsCut, "__call__", cut):
        yield


@contextlib.contextmanager
def labels_shifted_across_the_cut() -> Iterator[None]:
    """Labels are shifted within each rank's rows, so the last row of a rank has none."""
    right = tasks.token_loss

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        targets = batch["targets"].clone()
        targets[:, targets.shape[1] // 2 - 1] = tasks.IGNORED
        return right(logits, batch | {"targets": targets})

    with mock.patch.object(tasks, "token_loss", loss):
        yield


@contextlib.contextmanager
def gradient_of_keys_lost() -> Iterator[None]:
    """The gradients of keys that the other rank's heads give are lost on their way back."""
    right, calls = row_exchange.differentiate, 0

    def lose(grad: Tensor, dim: int, split: Split, counts: Counts, axis: Axis) -> Tensor:
        found = row_exchange._exchange_to_rows(grad, dim, split, counts, axis)
        parts = [split.take(found, rank) for rank in range(axis.size)]
        return split.join([p if rank == axis.rank else p * 0 for rank, p in enumerate(parts)])

    def differentiate(run: Any, back: Any, tensor: Tensor, *given: Any) -> Tensor:
        nonlocal calls
        if run is row_exchange._exchange_to_heads:
            calls += 1
            back = lose if calls % 3 == 2 else back
        return right(run, back, tensor, *given)

    with mock.patch.object(row_exchange, "differentiate", differentiate):
        yield


@contextlib.contextmanager
def gradient_of_rows_lost() -> Iterator[None]:
    """Before the first block, the gradient of the first rank's rows is lost."""

    def lose(grad: Tensor, dim: int, division: Division, axis: Axis) -> Tensor:
        joined = row_exchange.all_gather_rows(grad, dim, division, axis)
        joined.narrow(dim, 0, division.counts[0]).zero_()
        return joined

    with _replacing(row_exchange._own_rows, back=lose):
        yield


@contextlib.contextmanager
def weights_not_summed_over_cp() -> Iterator[None]:
    """Each rank of cp keeps the gradients that its own rows and heads give the weights."""
    with _adding_up(lambda self, gradients, right: None):
        yield


@contextlib.contextmanager
def weights_summed_twice_over_cp() -> Iterator[None]:
    """The gradients of weights are summed over cp twice."""

    def add_up(self: Placement, gradients: Any, right: Any) -> None:
        right(self, gradients)
        right(self, gradients)

    with _adding_up(add_up):
        yield


@contextlib.contextmanager
def weights_averaged_over_cp() -> Iterator[None]:
    """The gradients of weights are averaged over cp."""

    def add_up(self: Placement, gradients: Any, right: Any) -> None:
        right(self, gradients)
        for name in self.partial:
            gradients[name].div_(self._axis("cp").size)

    with _adding_up(add_up):
        yield


@contextlib.contextmanager
def causal_by_local_index() -> Iterator[None]:
    """By gather, each rank counts its rows of the causal mask from 0."""

    def make(positions: Tensor, num_keys: int) -> Tensor:
        return torch.ones(len(positions), num_keys, dtype=torch.bool).tril()

    with mock.patch.object(gather, "_make_causal", make):
        yield


@contextlib.contextmanager
def causal_rows_of_another_rank() -> Iterator[None]:
    """By gather, each rank has the other rank's rows of the causal mask."""

    def make(positions: Tensor, num_keys: int) -> Tensor:
        others = sorted(set(range(num_keys)) - set(positions.tolist()))
        return torch.ones(num_keys, num_keys, dtype=torch.bool).tril()[others]

    with mock.patch.object(gather, "_make_causal", make):
        yield


@contextlib.contextmanager
def positions_of_the_first_rank() -> Iterator[None]:
    """By gather, every rank takes the first rank's cosines and sines."""
    with mock.patch.object(
        apply, "cut_entering", lambda tensor, dim, rows: rows.division.take(tensor, dim, 0)
    ):
        yield


@contextlib.contextmanager
def gathered_keys_of_one_rank_twice() -> Iterator[None]:
    """By gather, the first rank's keys and values take the place of the second's."""
    right = gather._gather_both

    def both(key: Tensor, value: Tensor, rows: Any) -> tuple[Tensor, ...]:
        found = right(key, value, rows)
        return tuple(rows.division.join([rows.division.take(x, 2, 0)] * 2, 2) for x in found)

    with mock.patch.object(gather, "_gather_both", both):
        yield


@contextlib.contextmanager
def gradient_of_gathered_keys_not_summed() -> Iterator[None]:
    """By gather, a rank's keys and values get no gradient from the other rank's queries."""

    def add_up(tensor: Tensor, dim: int, division: Division, axis: Axis) -> Tensor:
        return division.take(tensor, dim, axis.rank).contiguous()

    with mock.patch.object(gather, "_add_up_rows", add_up):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    fault.__name__: fault
    for fault in (
        positions_from_zero,
        mask_lost,
        mask_rows_of_another_rank,
        heads_in_another_order,
        heads_of_one_rank_twice,
        rows_in_another_order,
        keys_of_one_rank_twice,
        rows_of_another_rank,
        rows_joined_in_another_order,
        zigzag_not_undone,
        dropout_from_position_zero,
        labels_shifted_across_the_cut,
        gradient_of_keys_lost,
        gradient_of_rows_lost,
        weights_not_summed_over_cp,
        weights_summed_twice_over_cp,
        weights_averaged_over_cp,
        causal_by_local_index,
        causal_rows_of_another_rank,
        positions_of_the_first_rank,
        gathered_keys_of_one_rank_twice,
        gradient_of_gathered_keys_not_summed,
    )
}
