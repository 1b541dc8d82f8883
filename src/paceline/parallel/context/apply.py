"""Carries out a plan of cp: adds hooks where sequences are divided and exchanged, and changes lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from paceline.mesh import Axis
from paceline.parallel.context.context_plan import ContextPlan, Crossing, SizeChange
from paceline.parallel.context.gather import attend_by_rows, cut_entering, refuse_unknown
from paceline.parallel.context.lengths import change_given
from paceline.parallel.context.row_exchange import Rows, join_rows, take_rows, to_heads, to_rows
from paceline.parallel.context.whole_modules import cut_whole, join_whole
from paceline.parallel.dropout.replacements import Cut, Masks
from paceline.parallel.parameter_hooks import check_hooks
from paceline.parallel.split import Split
from paceline.parallel.tensor.calls import ATTENDING, CallSite, change_calls, change_operand
from paceline.parallel.tensor.calls import Change as CallChange
from paceline.parallel.tensor.differentiable import copy
from paceline.parallel.tensor.hooks import Change, change_argument, change_input, change_output
from paceline.parallel.tensor.trace import NUM_SAMPLES, WATCHED


def apply_context(model: nn.Module, plan: ContextPlan, axis: Axis, masks: Masks | None = None) -> list[Rows]:
    """Run a model's blocks on a part of the sequence, in place. No collective runs here; forwards have some.

    Args:
        model: on meta, or with the same weights on every rank of cp; tp may have split it.
        plan: of the same model, before tp has split it.
        axis: cp.

    Returns:
        The rows of each stretch, which the forward that enters it divides.
    """
    assert plan.num_ranks == axis.size
    check_hooks(model.named_parameters())
    modules = dict(model.named_modules())
    rows = [Rows(axis, is_causal=plan.is_causal(index)) for index in range(len(plan.stretches))]
    inside: dict[str, dict[CallSite, CallChange]] = defaultdict(dict)
    for name, sizes in plan.sizes.items():
        for spot, changes in sizes.items():
            inside[name][spot] = _change_sizes(changes, rows[plan.stretch_of[name]])
    for crossing in plan.crossings:
        module, change = modules[crossing.module], _cross(crossing, rows[crossing.stretch])
        if crossing.spot is not None:
            inside[crossing.module][crossing.spot] = _cross_call(crossing, change, axis)
        elif crossing.kind == "to_rows":
            change_input(module, crossing.keys, change)
        else:
            if crossing.sums:
                change_input(module, crossing.keys, partial(copy, axis=axis))
            change_output(module, change)
    for call in plan.attending:
        inside[call.module][call.spot] = attend_by_rows(
            rows[call.stretch], gathers=call.gathers, is_causal=call.is_causal
        )
    for name, found in inside.items():
        listed = {
            site: [found.get(CallSite(site, number)) for number in range(count)]
            for site, count in plan.sites[name].items()
        }
        unknown = refuse_unknown(name) if name in {call.module for call in plan.attending} else None
        change_calls(modules[name], WATCHED | ATTENDING, listed, unknown)
    for stretch, own in zip(plan.stretches, rows, strict=True):
        change_input(modules[stretch.first], stretch.keys, partial(take_rows, dim=stretch.dim, rows=own))
        change_output(modules[stretch.last], partial(join_rows, dim=stretch.dim, rows=own))
    for entering in plan.entering:  # behind the stream's hook, which counts the rows
        dim = entering.dim
        change = (
            partial(copy, axis=axis)
            if dim is None
            else partial(cut_entering, dim=dim, rows=rows[entering.stretch])
        )
        change_argument(modules[entering.module], entering.path, change)
    for mixture in plan.whole:
        module, own = modules[mixture.module], rows[mixture.stretch]
        for path, place in mixture.takes.items():
            change_argument(module, path, partial(join_whole, place=place, rows=own))
        for number, place in mixture.gives.items():
            change_output(module, partial(cut_whole, place=place, rows=own), number)
    for key, (index, cut) in plan.draws.items():
        assert masks is not None
        masks.splits[key] = _cut_further(masks.splits.get(key, ()), _cut(cut, rows[index]))
    return rows


def _cross(crossing: Crossing, rows: Rows) -> Change:
    dim, split = crossing.dim, crossing.split
    if crossing.kind == "to_heads":
        return partial(to_heads, dim=dim, split=split, rows=rows)
    if crossing.kind == "to_rows":
        return partial(to_rows, dim=dim, split=split, rows=rows)
    return partial(split.take, rank=rows.axis.rank)


def _cross_call(crossing: Crossing, change: Change, axis: Axis) -> CallChange:
    def cross(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        if crossing.kind == "to_rows":
            return run(*change_operand(func, args, change), **kwargs)
        if crossing.sums:
            args = change_operand(func, args, partial(copy, axis=axis))
        return change(run(*args, **kwargs))

    return cross


def _change_sizes(changes: list[SizeChange], rows: Rows) -> CallChange:
    def size(kind: str) -> Callable[[int], int]:
        if kind == "heads":
            return lambda given: given // rows.axis.size
        return lambda given: given // rows.own * rows.whole

    def resize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        for change in changes:
            args, kwargs = change_given(func, args, kwargs, change.dim, size(change.kind))
        return run(*args, **kwargs)

    return resize


def _cut_further(
    present: Sequence[Cut | Callable[[], Cut]], cut: Cut | Callable[[], Cut]
) -> list[Cut | Callable[[], Cut]]:
    """Return the cuts of a tensor under dropout that tp has cut along one dimension already."""
    for place, other in enumerate(present):
        if isinstance(other, Cut) and isinstance(cut, Cut) and other.dim == cut.dim:
            # Heads are cut by tp first. The ranks of cp that share a rank of tp have neighbouring runs.
            assert other.outer == cut.outer, (other, cut)
            both = replace(
                cut,
                num_parts=other.num_parts * cut.num_parts,
                part=other.part * cut.num_parts + cut.part,
            )
            return [*present[:place], both, *present[place + 1 :]]
    return [*present, cut]


@dataclass(frozen=True)
class _RowsCut:
    """The rows of a dropped tensor that this rank has, as the forward that runs now divides them."""

    dim: int
    rows: Rows

    def __call__(self) -> Cut:
        axis, division = self.rows.axis, self.rows.division
        return Cut(self.dim, 1, axis.size, axis.rank, division.list_runs(axis.rank), division.length)


def _cut(cut: int | Split, rows: Rows) -> Cut | Callable[[], Cut]:
    """Return the part of a dropped tensor that this rank has: the rows of a dimension, or some heads."""
    return _RowsCut(cut, rows) if isinstance(cut, int) else Cut.of(cut, rows.axis.rank, NUM_SAMPLES)
