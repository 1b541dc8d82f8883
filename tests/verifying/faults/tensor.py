"""Faults of tensor and sequence parallelism: in sums, parts and random numbers among the ranks of tp."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel import norm, order
from paceline.parallel.construct.hand_out import Construction
from paceline.parallel.dropout.replacements import Masks, _look_up
from paceline.parallel.placement import Placement
from paceline.parallel.replicate import Replica
from paceline.parallel.tensor import apply, differentiable, vocabulary

Change = Callable[[Tensor], Tensor]


def _summing_linears(change: Callable[[Change], Change]) -> AbstractContextManager[Any]:
    """Another sum than the right one after linear layers that are split by rows."""
    right = apply._add_up_linear
    return mock.patch.object(apply, "_add_up_linear", lambda module, add: right(module, change(add)))


def _applying(after: Callable[[nn.Module, Any, Any, Any], None]) -> AbstractContextManager[Any]:
    """Something that happens once a plan has been applied."""
    right = order.apply_plan

    def run(model: nn.Module, plan: Any, axis: Any, masks: Any = None) -> None:
        right(model, plan, axis, masks)
        after(model, plan, axis, masks)

    return mock.patch.object(order, "apply_plan", run)


@contextlib.contextmanager
def row_sum_missing() -> Iterator[None]:
    """No sum over tp after a linear layer that is split by rows."""
    with _summing_linears(lambda add: lambda tensor: tensor.view_as(tensor)):
        yield


@contextlib.contextmanager
def row_sum_twice() -> Iterator[None]:
    """That sum is summed over tp again."""
    with _summing_linears(lambda add: lambda tensor: add(add(tensor))):
        yield


@contextlib.contextmanager
def bias_on_every_rank() -> Iterator[None]:
    """The bias of such a layer is added on every rank, before the sum."""

    def add_up(module: nn.Module, change: Change) -> None:
        right = module.forward

        def forward(self: nn.Module, input: Tensor) -> Tensor:
            return change(right(input))

        forward.__module__ = apply.__name__  # as the library's own code has it
        module.forward = MethodType(forward, module)

    with mock.patch.object(apply, "_add_up_linear", add_up):
        yield


@contextlib.contextmanager
def entry_sum_missing() -> Iterator[None]:
    """The gradient of attention's input is not summed over tp."""
    right = apply.change_input

    def change_input(module: nn.Module, keys: Any, change: Change) -> None:
        attends = type(module).__name__ == "Attention"
        right(module, keys, (lambda tensor: tensor) if attends else change)

    with mock.patch.object(apply, "change_input", change_input):
        yield


@contextlib.contextmanager
def entry_sum_twice() -> Iterator[None]:
    """That gradient is summed over tp twice."""
    right = apply.change_input

    def change_input(module: nn.Module, keys: Any, change: Change) -> None:
        attends = type(module).__name__ == "Attention"
        right(module, keys, (lambda tensor: change(change(tensor))) if attends else change)

    with mock.patch.object(apply, "change_input", change_input):
        yield


@contextlib.contextmanager
def summed_over_tp_in_place_of_dp() -> Iterator[None]:
    """The gradient's sum goes over the wrong axis."""
    axes: list[Any] = []

    def reduce(self: Replica, bucket: Any) -> Any:
        self.last_bucket_launched |= bucket.is_last()
        work = dist.all_reduce(bucket.buffer(), group=axes[-1].group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    with (
        _applying(lambda model, plan, axis, masks: axes.append(axis)),
        mock.patch.object(Replica, "_reduce_bucket", reduce),
    ):
        yield


@contextlib.contextmanager
def norm_per_part() -> Iterator[None]:
    """Each rank clips by the norm of its own parts."""
    with mock.patch.object(norm, "gather_rows", lambda own, group: own.reshape(1, -1)):
        yield


@contextlib.contextmanager
def whole_parts_counted_on_every_rank() -> Iterator[None]:
    """The norm counts parameters that are whole on all ranks of tp once per rank."""
    right = norm.measure_norm

    def measure(gradients: Any, parameters: Any, placement: Any, mesh: Any, **settings: Any) -> Tensor:
        names = [name for name, _ in gradients]
        return right(gradients, parameters, _AllDivided(placement, names), mesh, **settings)

    from paceline.train import update

    with mock.patch.object(update, "measure_norm", measure):
        yield


class _AllDivided:
    """A placement that takes every parameter for one that tp divides."""

    def __init__(self, placement: Any, names: list[str]) -> None:
        self._placement = placement
        self.splits = dict.fromkeys(names, next(iter(placement.splits.values())))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._placement, name)

    def counts(self, *_: Any) -> bool:
        return True


@contextlib.contextmanager
def tied_weights_untied() -> Iterator[None]:
    """Laying out copies tied weights, which the optimizer then updates separately."""
    right = order.apply_dropout

    def untie(model: nn.Module) -> Any:
        seen: set[int] = set()
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in seen:
                    module._parameters[key] = nn.Parameter(parameter.detach().clone())
                seen.add(id(parameter))
        return right(model)

    with mock.patch.object(order, "apply_dropout", untie):
        yield


@contextlib.contextmanager
def heads_share_masks() -> Iterator[None]:
    """All ranks of tp use rank 0's dropout mask for their own attention heads."""

    def share(model: nn.Module, plan: Any, axis: Any, masks: Any) -> None:
        masks.splits = {key: [replace(cut, part=0) for cut in cuts] for key, cuts in masks.splits.items()}

    with _applying(share):
        yield


@contextlib.contextmanager
def residual_masks_differ() -> Iterator[None]:
    """Ranks of tp use different dropout masks for a tensor that all of them hold."""
    right = Masks.draw

    def draw(self: Masks, key: str, *args: Any) -> Tensor:
        mask = right(self, key, *args)
        return mask if _look_up(self.splits, key) or dist.get_rank() == 0 else mask.roll(1, -1)

    with mock.patch.object(Masks, "draw", draw):
        yield


@contextlib.contextmanager
def partial_gradients_not_summed() -> Iterator[None]:
    """Whole weights applied to a part of the sequence keep the gradient of that part."""
    with mock.patch.object(Placement, "add_up_partial", return_value=None):
        yield


@contextlib.contextmanager
def sequence_takes_another_part() -> Iterator[None]:
    """Ranks take each other's parts of the sequence."""
    right = differentiable.take_rows

    def take(tensor: Tensor, axis: Any, dim: int) -> Tensor:
        return right(tensor, replace(axis, rank=axis.size - 1 - axis.rank), dim)

    with mock.patch.object(apply, "take_rows", take):
        yield


@contextlib.contextmanager
def sequence_scatters_without_sum() -> Iterator[None]:
    """After a linear layer, each rank keeps its part of the sequence without the sum over ranks."""
    with mock.patch.object(apply, "add_up_rows", differentiable.take_rows):
        yield


@contextlib.contextmanager
def rows_off_by_one() -> Iterator[None]:
    """Rank 1's rows of the embedding are off by one token."""
    right = vocabulary.look_up

    def look_up(table: Tensor, ids: Tensor, padding: int | None, axis: Any) -> Tensor:
        return right(table, ids if axis.rank != 1 else (ids - 1).clamp(min=0), padding, axis)

    with mock.patch.object(apply, "look_up", look_up):
        yield


@contextlib.contextmanager
def ignored_targets_counted() -> Iterator[None]:
    """The loss over a split vocabulary counts ignored targets."""
    right = vocabulary._CutCrossEntropy.forward

    def forward(ctx: Any, part: Tensor, target: Tensor, ignore_index: int, axis: Any) -> Tensor:
        return right(ctx, part, target, -(10**6), axis)

    with mock.patch.object(vocabulary._CutCrossEntropy, "forward", staticmethod(forward)):
        yield


@contextlib.contextmanager
def maximum_of_a_part() -> Iterator[None]:
    """That loss subtracts the highest logit of each rank's own part."""
    right = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
        return None if op == dist.ReduceOp.MAX else right(tensor, op=op, group=group)

    with mock.patch.object(vocabulary, "dist", SimpleNamespace(**{**vars(dist), "all_reduce": all_reduce})):
        yield


@contextlib.contextmanager
def vocabulary_gradient_of_own_part() -> Iterator[None]:
    """Its backward normalises probabilities over each rank's own part."""
    right = vocabulary._CutCrossEntropy.backward

    def backward(ctx: Any, grad: Tensor) -> Any:
        result, *nothing = right(ctx, grad)
        return (result - result.mean(dim=1, keepdim=True), *nothing)

    with mock.patch.object(vocabulary._CutCrossEntropy, "backward", staticmethod(backward)):
        yield


@contextlib.contextmanager
def start_by_rank() -> Iterator[None]:
    """A model built on its ranks has different initial weights on each."""
    right = Construction.hand_out

    def hand_out(self: Construction, *args: Any) -> Iterator[tuple[list[str], int, Tensor]]:
        for names, first, value in right(self, *args):
            yield names, first, value.flip(0) if dist.get_rank() and value.is_floating_point() else value

    with mock.patch.object(Construction, "hand_out", hand_out):
        yield


@contextlib.contextmanager
def resumed_with_old_masks() -> Iterator[None]:
    """From the second step on, dropout repeats the masks of the step before, as after a miscounted resume."""
    from paceline.train.runners import runner

    right = runner.derive_seed

    def derive(seed: int, step: Any, *parts: Any) -> int:
        return right(seed, max(1, step - 1) if isinstance(step, int) else step, *parts)

    with mock.patch.object(runner, "derive_seed", derive):
        yield


@contextlib.contextmanager
def sums_rounded_to_bf16() -> Iterator[None]:
    """Sums over tp are sent in bf16."""

    def all_reduce(tensor: Tensor, axis: Any) -> Tensor:
        total = tensor.bfloat16()
        dist.all_reduce(total, group=axis.group)
        return total.to(tensor.dtype)

    with mock.patch.object(differentiable, "all_reduce", all_reduce):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    fault.__name__: fault
    for fault in (
        row_sum_missing,
        row_sum_twice,
        bias_on_every_rank,
        entry_sum_missing,
        entry_sum_twice,
        summed_over_tp_in_place_of_dp,
        norm_per_part,
        whole_parts_counted_on_every_rank,
        tied_weights_untied,
        heads_share_masks,
        residual_masks_differ,
        partial_gradients_not_summed,
        sequence_takes_another_part,
        sequence_scatters_without_sum,
        rows_off_by_one,
        ignored_targets_counted,
        maximum_of_a_part,
        vocabulary_gradient_of_own_part,
        start_by_rank,
        resumed_with_old_masks,
        sums_rounded_to_bf16,
    )
}
