"""Checks the gradients of a plan of tp, on the trial forward that has the plan's parts and entries.

A plan says where backward sums gradients over ranks (entries) and which parameters' gradients are summed
once per step. Here backward is followed through the recorded operations. A whole tensor gets its whole
gradient from operations that all ranks compute alike, and an addend from those that use cut tensors. If both
meet, or an addend arrives where the whole gradient is needed, the plan would train on wrong gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from paceline.parallel.tensor.flow import Flow
from paceline.parallel.tensor.trace import Trace

WHOLE, ADDEND = "whole", "addend"


class BackwardCheck:
    """A backward through a trial forward on parts.

    Args:
        trace: the forward on whole tensors.
        parts: the forward on parts, in which each entry has replaced its tensor.
        pairs: the operations of both that are the same, by number.
    """

    def __init__(self, flow: Flow, trace: Trace, parts: Trace, pairs: Iterable[tuple[int, int]]) -> None:
        self._flow, self._trace, self._parts = flow, trace, parts
        self._ops = {part: whole for whole, part in pairs}
        # Parameters and buffers have the same numbers in both.
        self._same = {number: number for number in trace.names}
        self._replaced: dict[int, list[int]] = defaultdict(list)
        self._given: dict[int, set[str]] = defaultdict(set)
        for new, old in parts.replaced.items():
            self._replaced[old].append(new)

    def find_wrong(self) -> tuple[int, str] | None:
        """Return an operation of the whole trace whose gradients would be wrong, and why."""
        self._match()
        left = {
            n for n, same in self._same.items() if same in self._trace.leaving
        } - self._parts.replaced.keys()
        for number in {*self._parts.outputs, *self._parts.leaving, *left}:
            self._given[number].add(WHOLE)
        for number in range(len(self._parts.ops) - 1, -1, -1):
            reason = self._pass_back(number)
            if reason is not None:
                return self._ops.get(number, max(self._ops.values(), default=0)), reason
        for number in sorted(self._trace.parameters):
            name, is_cut = self._trace.names[number], number in self._flow.cut
            is_added = name in self._flow.partial
            wanted = ADDEND if is_added else WHOLE
            if (is_cut and is_added) or not (is_cut or self._total(number) <= {wanted}):
                uses = [
                    at for at, op in enumerate(self._trace.ops) if number in op.inputs and not op.is_outside
                ]
                return uses[-1], f"{name} would get a wrong gradient"
        return None

    def _match(self) -> None:
        """Find which tensors of both traces are the same."""
        waiting = dict(self._parts.replaced)
        for number, op in enumerate(self._parts.ops):
            for new in [new for new in op.inputs if new in waiting]:
                self._same[new] = self._same.get(waiting[new], -1)
            if number in self._ops:
                whole = self._trace.ops[self._ops[number]]
                for mine, its in zip(op.inputs, whole.inputs, strict=False):
                    self._same.setdefault(mine, its)
                self._same.update(zip(op.outputs, whole.outputs, strict=False))
            elif op.inputs:  # a copy, which the other trace may have too or not
                self._same.update(dict.fromkeys(op.outputs, self._same.get(op.inputs[0], -1)))

    def _pass_back(self, number: int) -> str | None:
        op, whole = self._parts.ops[number], self._ops.get(number)
        where = f"the gradient of {op.name} in {op.module or 'the model'} would be wrong"
        given: set[str] = set()
        for tensor in op.outputs:
            if not self._is_cut(tensor) and self._is_learned(tensor):
                given |= self._total(tensor)
        if len(given) > 1:
            return where
        is_sum = whole in self._flow.sums or whole in self._flow.lookups
        if is_sum and ADDEND in given:
            return where
        mixes = whole not in self._flow.lookups and any(map(self._is_cut, (*op.inputs, *op.outputs)))
        mixes = mixes and not op.is_outside
        for tensor in op.inputs if op.name != "detach" else ():
            if not self._is_learned(tensor) or self._is_cut(tensor):
                continue
            if op.is_outside and tensor in self._trace.parameters:
                continue  # `reads.py` does what such a use needs
            is_bias = is_sum and len(op.inputs) == 3 and tensor == op.inputs[0]
            self._given[tensor] |= {ADDEND} if mixes and not is_bias else given
        return None

    def _total(self, tensor: int) -> set[str]:
        """Return what a tensor's uses give it; an entry turns addends into the whole gradient."""
        found = set(self._given[tensor])
        for new in self._replaced.get(tensor, ()):
            inner = self._total(new)
            found |= {WHOLE} if inner == {ADDEND} else {WHOLE, ADDEND} if inner else set()
        return found

    def _is_cut(self, tensor: int) -> bool:
        return self._same.get(tensor) in self._flow.cut

    def _is_learned(self, tensor: int) -> bool:
        return bool(self._flow.learned.get(self._same.get(tensor, -1)))
