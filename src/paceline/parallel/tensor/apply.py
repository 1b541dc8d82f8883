"""Carries out a plan: replaces whole parameters by parts, and adds hooks where ranks communicate."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.parallel.dropout.replacements import Cut, Masks
from paceline.parallel.parameter_hooks import check_hooks, move_hooks
from paceline.parallel.split import Split, take_parts
from paceline.parallel.tensor.calls import SUMMED, CallSite, change_calls
from paceline.parallel.tensor.calls import Change as CallChange
from paceline.parallel.tensor.differentiable import add_up, add_up_rows, copy, gather, gather_rows, take_rows
from paceline.parallel.tensor.flow import CutBoundary
from paceline.parallel.tensor.hooks import Change, change_input, change_output
from paceline.parallel.tensor.sequence import DIM, Sequence
from paceline.parallel.tensor.sizes import SIZED, divide_size
from paceline.parallel.tensor.split_plan import SplitPlan
from paceline.parallel.tensor.sums import add_up_call, add_up_lookup
from paceline.parallel.tensor.trace import NUM_SAMPLES
from paceline.parallel.tensor.vocabulary import CutTensor, look_up
from paceline.torch_seams.modules import register_before_users
from paceline.torch_seams.trees import tree_flatten, tree_unflatten


def apply_plan(model: nn.Module, plan: SplitPlan, axis: Axis, masks: Masks | None = None) -> None:
    """Split a model over the ranks of tp, in place. No collective runs here; later forwards have some.

    Args:
        model: whole, with the same weights on every rank, or on meta.
        axis: tp.
    """
    assert plan.num_ranks == axis.size
    before = dict(model.named_parameters())
    check_hooks(before.items())
    take_parts(model, plan.splits, axis.rank)
    move_hooks(before, model)
    modules = dict(model.named_modules())
    along = plan.sequence or Sequence()
    inside: dict[str, dict[CallSite, CallChange]] = defaultdict(dict)
    for taken in along.whole:  # before the entries' hooks, which see the whole sequence
        change_input(modules[taken.module], taken.keys, partial(gather, axis=axis, dim=DIM))
    for name, sizes in plan.sizes.items():
        inside[name] = {spot: divide_size(dim, axis.size) for spot, dim in sizes.items()}
    late = _entries_after_cuts(plan)
    for entry in plan.entries:
        if entry in late:
            continue
        change = (
            partial(gather_rows, axis=axis, dim=DIM) if entry in along.entries else partial(copy, axis=axis)
        )
        if entry.keys:
            change_input(modules[entry.module], entry.keys, change)
        else:
            change_output(modules[entry.module], change, entry.number)
    for leaving in plan.exits:
        module = modules[leaving.module]
        change = (
            partial(add_up_rows, axis=axis, dim=DIM) if leaving in along.exits else partial(add_up, axis=axis)
        )
        if leaving.spot is not None:
            is_lookup = leaving.kind == "lookup call"
            sums = add_up_lookup(change, axis) if is_lookup else add_up_call(change)
            inside[leaving.module][leaving.spot] = sums
        elif leaving.kind == "linear":
            _add_up_linear(module, change)
        elif leaving.kind == "lookup":
            assert isinstance(module, nn.Embedding)
            _add_up_lookups(module, axis, change)
        else:
            change_output(module, change)
    for name in dict.fromkeys(taken.module for taken in along.whole):
        change_output(modules[name], _take_rows(axis))
    for name, changes in inside.items():
        listed = {
            site: [changes.get(CallSite(site, number)) for number in range(count)]
            for site, count in plan.sites[name].items()
        }
        change_calls(modules[name], SIZED | SUMMED, listed)
    for key, split in plan.draws.items():
        assert masks is not None
        masks.splits[key] = [] if split is None else [Cut.of(split, axis.rank, NUM_SAMPLES)]
    for key in along.draws:
        assert masks is not None
        masks.splits[key] = [Cut(DIM, 1, axis.size, axis.rank)]
    if plan.outputs:
        _cut_outputs(model, plan.outputs, axis)


def divide_stretches(model: nn.Module, plan: SplitPlan, axis: Axis) -> None:
    """Cut the activations between the blocks along the sequence, if the plan does; see `apply_plan`.

    After recompute: the second forward of a block must begin with the same input as the first one, before it
    is cut.
    """
    for stretch in (plan.sequence or Sequence()).stretches:
        change_input(model.get_submodule(stretch.first), stretch.keys, _take_rows(axis))
        change_output(model.get_submodule(stretch.last), partial(gather, axis=axis, dim=DIM))
    for entry in _entries_after_cuts(plan):
        change_input(model.get_submodule(entry.module), entry.keys, partial(gather_rows, axis=axis, dim=DIM))


def _entries_after_cuts(plan: SplitPlan) -> list[CutBoundary]:
    """Return the entries that gather what the same module's input was cut into."""
    if plan.sequence is None:
        return []
    first = {stretch.first for stretch in plan.sequence.stretches}
    gathering = plan.sequence.entries
    return [entry for entry in plan.entries if entry in gathering and entry.keys and entry.module in first]


def _add_up_linear(module: nn.Module, change: Change) -> None:
    """Make a linear layer sum over the ranks; all have its bias, which is added to the sum alone."""
    if isinstance(module, nn.Linear):

        def product(self: nn.Module, tensor: Tensor) -> Tensor:
            return F.linear(tensor, self.weight)  # type: ignore[arg-type]
    else:

        def product(self: nn.Module, tensor: Tensor) -> Tensor:
            return tensor @ self.weight  # type: ignore[operator]

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        total = change(product(self, input))
        bias = self.bias
        return total if bias is None else total + bias.to(total.dtype)  # type: ignore[operator]

    module.forward = MethodType(forward, module)


def _add_up_lookups(module: nn.Embedding, axis: Axis, change: Change) -> None:
    def forward(self: nn.Embedding, input: Tensor) -> Tensor:
        return change(look_up(self.weight, input, self.padding_idx, axis))

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _cut_outputs(model: nn.Module, outputs: dict[int, Split], axis: Axis) -> None:
    def hook(_module: nn.Module, _args: Any, result: Any) -> Any:
        leaves, structure = tree_flatten(result)
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for number, split in outputs.items():
            leaves[tensors[number]] = CutTensor(leaves[tensors[number]], split, axis)
        return tree_unflatten(leaves, structure)

    register_before_users(model, hook)


def _take_rows(axis: Axis) -> Change:
    def take(tensor: Tensor) -> Tensor:
        if tensor.shape[DIM] % axis.size:
            raise PacelineError(
                "PL464",
                saw=f"sequence=true with a sequence of {tensor.shape[DIM]} on tp={axis.size}.",
                rule="Every rank of tp holds an equal part of the sequence between the blocks.",
                fix=f"Pad sequences to a multiple of {axis.size}, or leave sequence out.",
            )
        return take_rows(tensor, axis, DIM)

    return take
