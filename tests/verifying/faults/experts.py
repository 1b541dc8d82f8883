"""Faults of layouts that share experts: in the way of tokens, and in the sums of the experts' gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.models import moe
from paceline.parallel import norm
from paceline.parallel.context import apply
from paceline.parallel.experts import shared, spread
from paceline.parallel.experts.balance import Choices
from paceline.parallel.experts.expert_sums import ExpertSum
from paceline.parallel.experts.forms import ExpertForm
from paceline.parallel.placement import Placement


@contextlib.contextmanager
def experts_gradient_scaled_by_ep() -> Iterator[None]:
    """The gradient of experts counts once per rank of ep."""
    right = ExpertSum.end

    def end(self: ExpertSum) -> None:
        right(self)
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(self._axis.size)

    with mock.patch.object(ExpertSum, "end", end):
        yield


@contextlib.contextmanager
def experts_not_summed_over_copies() -> Iterator[None]:
    """Each copy of the experts keeps the gradient of its own tokens."""
    with mock.patch.object(ExpertSum, "end"):
        yield


@contextlib.contextmanager
def experts_averaged_over_ep() -> Iterator[None]:
    """The gradients of experts are averaged over the ranks of ep, although each has other experts."""
    right = ExpertSum.end

    def end(self: ExpertSum) -> None:
        right(self)
        for parameter in self._parameters:
            dist.all_reduce(parameter.grad, group=self._axis.group)
            assert parameter.grad is not None
            parameter.grad.div_(self._axis.size)

    with mock.patch.object(ExpertSum, "end", end):
        yield


@contextlib.contextmanager
def answers_in_another_order() -> Iterator[None]:
    """The answers travel back in the order of the experts, not of the ranks that have asked."""

    def multiply(form: ExpertForm, rows: Tensor, counts: Tensor) -> Tensor:
        experts = torch.arange(counts.shape[1]).repeat(counts.shape[0])
        order = experts.repeat_interleave(counts.reshape(-1)).argsort(stable=True)
        return form.multiply(rows.index_select(0, order), counts.sum(0), form.list_weights())

    with mock.patch.object(shared, "_multiply_together", multiply):
        yield


@contextlib.contextmanager
def tokens_of_another_expert() -> Iterator[None]:
    """Each rank multiplies the rows for its experts by those of its neighbours in memory."""
    right = shared._multiply_together

    def multiply(form: ExpertForm, rows: Tensor, counts: Tensor) -> Tensor:
        return right(form, rows, counts.flip(1))

    with mock.patch.object(shared, "_multiply_together", multiply):
        yield


@contextlib.contextmanager
def norm_counts_copies_on_every_rank_of_ep() -> Iterator[None]:
    """The norm counts what all ranks of ep hold once per rank."""
    with mock.patch.object(Placement, "counts", return_value=True):
        yield


@contextlib.contextmanager
def norm_of_own_experts() -> Iterator[None]:
    """Each rank of ep clips by the norm of what it counts itself."""
    with mock.patch.object(norm, "gather_rows", lambda tensor, group: tensor):
        yield


@contextlib.contextmanager
def weights_of_another_token() -> Iterator[None]:
    """A token's answers are weighted by what the token before it gave its experts."""
    right = moe.ask_experts

    def ask(*args: Any) -> Tensor:
        return right(*args).roll(1, 0)

    with mock.patch.object(moe, "ask_experts", ask):
        yield


@contextlib.contextmanager
def router_by_rank() -> Iterator[None]:
    """The router takes the next expert on each further rank."""
    right = moe.Balance.forward

    def forward(self: moe.Balance, chances: Tensor) -> Tensor:
        return right(self, chances).roll(dist.get_rank(), -1)

    with mock.patch.object(moe.Balance, "forward", forward):
        yield


@contextlib.contextmanager
def bias_by_rank() -> Iterator[None]:
    """Each rank moves the routers' bias by the choices of every other microbatch, from its own on."""
    right = Choices.merge

    def merge(self: Choices, rows: Tensor) -> None:
        right(self, rows[dist.get_rank() :: dist.get_world_size()])

    with mock.patch.object(Choices, "merge", merge):
        yield


@contextlib.contextmanager
def mixture_of_own_rows() -> Iterator[None]:
    """Each rank of cp routes its own rows alone, and makes its auxiliary loss of them."""
    with (
        mock.patch.object(apply, "join_whole", lambda tensor, **_: tensor),
        mock.patch.object(apply, "cut_whole", lambda tensor, **_: tensor),
    ):
        yield


@contextlib.contextmanager
def mixture_cut_as_another_rank() -> Iterator[None]:
    """Behind a mixture, each rank of cp takes the other rank's rows."""

    def cut(tensor: Tensor, place: tuple[int, bool], rows: Any) -> Tensor:
        return rows.take(torch.flip(tensor.unflatten(1, (2, -1)), (1,)).flatten(1, 2), 1)  # type: ignore[no-any-return]

    with mock.patch.object(apply, "cut_whole", cut):
        yield


@contextlib.contextmanager
def answers_of_runs_in_another_order() -> Iterator[None]:
    """The ranks of cp put the answers for their experts together in the order of the other rank."""
    right = spread._join

    def join(own: Tensor, lengths: tuple[int, ...], rows: spread.SameRows) -> Tensor:
        found = list(torch.split(right(own, lengths, rows), list(lengths)))
        return torch.cat(found[::-1])

    with mock.patch.object(spread, "_join", join):
        yield


@contextlib.contextmanager
def rows_gradient_of_own_experts() -> Iterator[None]:
    """Of a mixture's tokens, each rank of cp has the gradients that its own experts give."""
    right = spread.differentiate

    def keep(gradient: Tensor, lengths: tuple[int, ...], rows: spread.SameRows) -> Tensor:
        runs = list(torch.split(spread._join(gradient, lengths, rows), list(lengths)))
        return torch.cat([run * (number % rows.size == rows.rank) for number, run in enumerate(runs)])

    def differentiate(run: Any, back: Any, tensor: Tensor, *given: Any) -> Tensor:
        return right(run, keep if run is spread._take else back, tensor, *given)

    with mock.patch.object(spread, "differentiate", differentiate):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    fault.__name__: fault
    for fault in (
        experts_gradient_scaled_by_ep,
        experts_not_summed_over_copies,
        experts_averaged_over_ep,
        answers_in_another_order,
        tokens_of_another_expert,
        norm_counts_copies_on_every_rank_of_ep,
        norm_of_own_experts,
        weights_of_another_token,
        router_by_rank,
        bias_by_rank,
        mixture_of_own_rows,
        mixture_cut_as_another_rank,
        answers_of_runs_in_another_order,
        rows_gradient_of_own_experts,
    )
}
