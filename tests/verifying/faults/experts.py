"""Faults of layouts that share experts: in the way of tokens, and in the sums of the experts' gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel import norm
from paceline.parallel.experts import layout
from paceline.parallel.experts.forms import ExpertForm
from paceline.parallel.experts.gradients import QuickExpertSum
from paceline.parallel.placement import Placement


@contextlib.contextmanager
def experts_gradient_scaled_by_ep() -> Iterator[None]:
    """The gradient of experts counts once per rank of ep."""
    right = QuickExpertSum.end

    def end(self: QuickExpertSum) -> None:
        right(self)
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(self._axis.size)

    with mock.patch.object(QuickExpertSum, "end", end):
        yield


@contextlib.contextmanager
def experts_not_summed_over_copies() -> Iterator[None]:
    """Each copy of the experts keeps the gradient of its own tokens."""
    with mock.patch.object(QuickExpertSum, "end"):
        yield


@contextlib.contextmanager
def experts_averaged_over_ep() -> Iterator[None]:
    """The gradients of experts are averaged over the ranks of ep, although each has other experts."""
    right = QuickExpertSum.end

    def end(self: QuickExpertSum) -> None:
        right(self)
        for parameter in self._parameters:
            dist.all_reduce(parameter.grad, group=self._axis.group)
            assert parameter.grad is not None
            parameter.grad.div_(self._axis.size)

    with mock.patch.object(QuickExpertSum, "end", end):
        yield


@contextlib.contextmanager
def answers_in_another_order() -> Iterator[None]:
    """The answers travel back in the order of the experts, not of the ranks that have asked."""

    def multiply(form: ExpertForm, rows: Tensor, counts: Tensor) -> Tensor:
        experts = torch.arange(counts.shape[1]).repeat(counts.shape[0])
        order = experts.repeat_interleave(counts.reshape(-1)).argsort(stable=True)
        return form.multiply(rows.index_select(0, order), counts.sum(0), form.list_weights())

    with mock.patch.object(layout, "_multiply_together", multiply):
        yield


@contextlib.contextmanager
def tokens_of_another_expert() -> Iterator[None]:
    """Each rank multiplies the rows for its experts by those of its neighbours in memory."""
    right = layout._multiply_together

    def multiply(form: ExpertForm, rows: Tensor, counts: Tensor) -> Tensor:
        return right(form, rows, counts.flip(1))

    with mock.patch.object(layout, "_multiply_together", multiply):
        yield


@contextlib.contextmanager
def norm_counts_copies_on_every_rank_of_ep() -> Iterator[None]:
    """The norm counts what all ranks of ep hold once per rank."""
    with mock.patch.object(Placement, "counts", return_value=True):
        yield


@contextlib.contextmanager
def norm_of_own_experts() -> Iterator[None]:
    """Each rank of ep clips by the norm of what it counts itself."""
    with mock.patch.object(norm, "gather_directly", lambda tensor, group: tensor):
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
    )
}
