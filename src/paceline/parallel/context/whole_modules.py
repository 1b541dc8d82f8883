"""Modules that need whole sequences, between others that get rows: mixtures of experts.

A mixture chooses among the tokens of all positions. It sorts them by expert. Its auxiliary loss is a function
of all choices of a microbatch, and so is what a limit of tokens per expert drops. So the rows of all ranks
are joined where such a module is called, every rank runs it on the whole sequence, and its result is cut.
With n ranks each sends its rows to n-1 others, once in forward and once in backward. The module's parameters
have their whole gradients on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.parallel.context.context_plan import WholeModule
from paceline.parallel.context.refusals import cannot_divide_error
from paceline.parallel.context.row_exchange import Rows, cut_rows, join_rows
from paceline.parallel.tensor.differentiable import seen_by_modes
from paceline.parallel.tensor.trace import ModuleCall, Trace

if TYPE_CHECKING:
    from paceline.parallel.context.walk import Walk


class WholeCalls:
    """The calls of modules that need whole sequences, in a trial forward.

    Args:
        names: full names of the modules. One inside of another is a part of that one.

    Attributes:
        by_first: by number of its first operation, each call.
        ops: the numbers of the operations inside of these calls.
    """

    def __init__(self, trace: Trace, names: Iterable[str]) -> None:
        wanted, end = set(names), 0
        self.by_first: dict[int, ModuleCall] = {}
        for call in trace.calls:
            if call.module in wanted and end <= call.first < call.last:
                self.by_first[call.first] = call
                end = call.last
        self.ops = {at for call in self.by_first.values() for at in range(call.first, call.last)}
        self._trace = trace

    def list_given(
        self, call: ModuleCall, last: int, rows: Collection[int], ends: Collection[int]
    ) -> list[tuple[int, int]]:
        """Return the results of a call that later operations use together with rows, or that blocks return as
        the stream: their numbers among the results, with the tensors. Others, such as what an auxiliary loss
        is made of, stay whole.

        Args:
            call: of a module that needs whole sequences.
            last: number after the stretch's last operation.
            rows: tensors that are rows before the call.
            ends: the first result of each block.
        """
        made = {tensor for at in range(call.first, call.last) for tensor in self._trace.ops[at].outputs}
        later = [at for at in range(call.last, last) if at not in self.ops]
        return [
            (number, tensor)
            for number, tensor in enumerate(call.outputs)
            if tensor in made and self._meets_rows(tensor, later, rows, ends)
        ]

    def _meets_rows(
        self, tensor: int, later: Sequence[int], rows: Collection[int], ends: Collection[int]
    ) -> bool:
        derived, others = {tensor}, set(rows)
        for at in later:
            op = self._trace.ops[at]
            is_derived, is_rows = (not found.isdisjoint(op.inputs) for found in (derived, others))
            if is_derived and is_rows:
                return True
            (derived if is_derived else others if is_rows else set()).update(op.outputs)
        return not derived.isdisjoint(ends)


def plan_whole(walk: Walk, index: int, call: ModuleCall, last: int) -> WholeModule | None:
    """Return how a module that needs whole sequences gets them; `None` if it gets no rows.

    Args:
        walk: has reached the call.
        index: number of the stretch.
        last: number after the stretch's last operation.
    """
    takes = {path: tensor for path, tensor in call.tensors.items() if tensor in walk.rows}
    if not takes:
        return None
    if call.module in walk.block_names:
        raise cannot_divide_error(
            f"the router and the experts of a mixture are in {call.module} itself, beside attention",
            fix="Put the router and the experts into a module of their own inside of the block, or set cp=1.",
        )
    for at in range(call.first, call.last):
        for tensor in walk.trace.ops[at].inputs:
            if tensor in walk.heads or (tensor in walk.rows and tensor not in takes.values()):
                raise cannot_divide_error(
                    f"the mixture {call.module} uses a part of the sequence that it does not get as an "
                    "argument"
                )
    wanted, length, shapes = walk.sequence(index), walk.length(index), walk.trace.shapes
    places: dict[tuple[int | str, ...], tuple[int, bool]] = {}
    leading: dict[tuple[int, ...], tuple[int, bool]] = {}
    for path, tensor in takes.items():
        place, outer = walk.find_rows(tensor, wanted)
        if shapes[tensor][place] != outer * length:
            raise cannot_divide_error(
                f"the mixture {call.module} gets positions and features in one dimension"
            )
        places[path] = leading[shapes[tensor][: place + 1]] = place, outer > 1
    gives = {
        number: place
        for number, tensor in walk.whole.list_given(call, last, walk.rows, walk.list_ends(index))
        for sizes, place in leading.items()
        if shapes[tensor][: len(sizes)] == sizes
    }
    if not gives:
        raise cannot_divide_error(
            f"the mixture {call.module} returns no tensor with the positions that it gets"
        )
    return WholeModule(call.module, places, gives, index)


@seen_by_modes
def join_whole(tensor: Tensor, place: tuple[int, bool], rows: Rows) -> Tensor:
    """Return the whole sequences, from this rank's rows.

    Args:
        place: the dimension of the positions, and whether samples share it.
    """
    dim, is_shared = place
    if not is_shared:
        return join_rows(tensor, dim, rows)
    apart: Tensor = tensor.unflatten(dim, (-1, rows.own))  # type: ignore[no-untyped-call]
    return join_rows(apart, dim + 1, rows).flatten(dim, dim + 1)


@seen_by_modes
def cut_whole(tensor: Tensor, place: tuple[int, bool], rows: Rows) -> Tensor:
    """Return this rank's rows of a tensor that all ranks have computed whole; see `join_whole`."""
    dim, is_shared = place
    if not is_shared:
        return cut_rows(tensor, dim, rows)
    apart: Tensor = tensor.unflatten(dim, (-1, rows.whole))  # type: ignore[no-untyped-call]
    return cut_rows(apart, dim + 1, rows).flatten(dim, dim + 1)


def resize_whole(place: tuple[int, bool], old: int, new: int) -> Any:
    """Return a function that gives a tensor another number of positions; in a trial forward."""

    def change(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[place[0]] = shape[place[0]] // old * new
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    return change
