"""Sequence parallelism: each rank has a part of the sequence between the parts of a block that tp splits.

Without it, all ranks of tp compute the same norms, dropouts and residual sums, and keep the same activations
for backward. With it, a stretch of blocks passes on [batch, length / ranks, width]. An entry gathers the
sequence; an exit sums and scatters it (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4.2.2). The bytes sent are those of the all-reduces that they replace.

Outside of entries and exits, operations must treat every position of the sequence by itself. That is checked
operation by operation in the trace. Around an operation that is not known to do so (a router, a scan,
attention that tp does not split), the smallest module whose inputs and output are the stream runs on the
whole sequence, on every rank. If there is none, the operation is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.parallel.tensor.flow import CutBoundary, Exit, Flow, find_runs, is_view
from paceline.parallel.tensor.rules import keeps_apart
from paceline.parallel.tensor.trace import Detour, ModuleCall, Trace, TracedOp

# The dimension of the sequence, in tensors [batch, length, ...].
DIM = 1


@dataclass
class SequenceStretch:
    """A run of blocks that pass on a part of the sequence.

    Attributes:
        first: the module whose input is cut.
        keys: the arguments of its call that are the stream.
        last: the module whose output is gathered.
    """

    first: str
    keys: tuple[int | str, ...]
    last: str


@dataclass
class Sequence:
    """The places where a model's activations are cut along the sequence.

    Attributes:
        stretches: the runs of blocks.
        entries: the plan's entries that gather.
        exits: the plan's exits that scatter.
        partial: whole parameters that see a part of the sequence, and so have a part of their gradient.
        draws: keys of dropouts that see a part.
        stream: what is cut along the sequence, as (operation, its output): writes in place keep the number.
        whole: inputs of the modules inside of stretches that run on the whole sequence. Their first output is
            cut.
        ops: operations on parts of the sequence.
    """

    stretches: list[SequenceStretch] = field(default_factory=list)
    entries: set[CutBoundary] = field(default_factory=set)
    exits: set[Exit] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)
    draws: set[str] = field(default_factory=set)
    stream: set[tuple[int, int]] = field(default_factory=set)
    whole: list[CutBoundary] = field(default_factory=list)
    ops: set[int] = field(default_factory=set)


def plan_sequence(
    trace: Trace,
    flow: Flow,
    modules: Mapping[str, nn.Module],
    blocks: list[str],
    num_ranks: int,
    failed: Mapping[int, str],
) -> Sequence:
    """Find the stretches of a model and check them.

    Args:
        flow: entries and exits of the plan.
        modules: by full name.
        blocks: names of the repeated blocks.
        num_ranks: degree of tp.
        failed: operations that do not work on a part of the sequence, with the reason.
    """
    plan = Sequence()
    calls = {call.module: call for call in trace.calls if call.module in set(blocks)}
    if len(calls) != sum(call.module in set(blocks) for call in trace.calls):
        raise _refuse("a block is called more than once in a forward")
    for stretch in find_runs(calls[name] for name in blocks if name in calls):
        _read_stretch(trace, flow, modules, stretch, num_ranks, plan, failed)
    tied = flow.find_used_elsewhere(plan.partial, plan.ops)
    if tied is not None:
        raise _refuse(f"{tied} is used with a part of the sequence and with the whole one")
    if not plan.stretches or not plan.entries:
        raise _refuse("no blocks were found that pass on a tensor and are split by tp")
    return plan


def _read_stretch(
    trace: Trace,
    flow: Flow,
    modules: Mapping[str, nn.Module],
    calls: list[ModuleCall],
    num_ranks: int,
    plan: Sequence,
    failed: Mapping[int, str],
) -> None:
    first, last = calls[0], calls[-1]
    keys = tuple(first.inputs) if len(first.inputs) == 1 else _stream_keys(calls)
    if not keys or not last.outputs:
        raise _refuse(f"{first.module} does not take one tensor and return one")
    taken = first.inputs[keys[0]]
    shape = trace.shapes[taken]
    if len(shape) != 3 or shape[DIM] % num_ranks:
        shown = "x".join(map(str, shape))
        raise _refuse(
            f"{first.module} takes {shown}, whose dimension {DIM} is not divisible by {num_ranks} ranks"
        )
    inside = [n for call in calls for n in range(call.first, call.last)]
    kinds: set[str] = set()
    while True:
        walk = _Walk(trace, flow, modules, shape, {taken}, failed, kinds)
        try:
            for number in inside:
                walk.pass_op(number)
            break
        except PacelineError:
            found = walk.find_whole(number, calls)
            if found is None or found in kinds:
                raise
            kinds.add(found)
    if last.outputs[0] not in walk.stream:
        raise _refuse(f"{last.module} does not return the tensor that passed through it")
    for tensor, how in trace.leaving.items():
        if tensor in walk.stream - {taken}:
            raise _refuse(f"a part of the sequence leaves the model: {how}")
    plan.stretches.append(SequenceStretch(first.module, keys, last.module))
    for name in ("entries", "exits", "partial", "stream", "ops"):
        getattr(plan, name).update(getattr(walk.plan, name))
    plan.whole += walk.plan.whole
    inner = tuple(f"{taken.module}{end}" for taken in plan.whole for end in "./")
    plan.draws |= {
        key for key, number in trace.drawn.items() if number in walk.stream and not key.startswith(inner)
    }


def _stream_keys(calls: list[ModuleCall]) -> tuple[int | str, ...]:
    """Return the arguments in which the second block gets the first one's output; the first uses the same."""
    if len(calls) < 2:
        return tuple(key for key in calls[0].inputs if key in (0, "hidden_states", "x", "src"))[:1]
    return tuple(key for key, number in calls[1].inputs.items() if number == calls[0].outputs[0])


class _Walk:
    """A walk that follows the stream through a stretch.

    Attributes:
        stream: numbers of the tensors that are cut along the sequence when they are used, and of the sums
            that are scattered into them.
        plan: what was found.
    """

    def __init__(
        self,
        trace: Trace,
        flow: Flow,
        modules: Mapping[str, nn.Module],
        shape: tuple[int, ...],
        stream: set[int],
        failed: Mapping[int, str],
        kinds: set[str],
    ) -> None:
        self.stream = stream
        self.plan = Sequence()
        self._trace, self._flow, self._modules, self._failed = trace, flow, modules, failed
        self._kinds, self._until = kinds, 0
        self._calls = {(call.module, call.spot): call for call in trace.written}
        self._shape = shape
        # Operations up to the one where a sum is scattered.
        self._unscattered: set[int] = set()
        for leaving in flow.exits:
            if leaving.spot is not None:
                call = self._calls[(leaving.module, leaving.spot)]
                self._unscattered.update(range(call.first, call.last))
        modules_with_exits = {leaving.module for leaving in flow.exits if leaving.spot is None}
        self._unscattered.update(n for n, op in enumerate(trace.ops) if op.module in modules_with_exits)
        self._entries = [
            (entry, call) for entry in flow.entries for call in trace.calls if call.module == entry.module
        ]

    def pass_op(self, number: int) -> None:
        op = self._trace.ops[number]
        if number < self._until:
            return
        for call in self._trace.calls if self._kinds else ():
            if call.first == number and collapse(call.module) in self._kinds and self._can_gather(call):
                self._gather_around(call)
                return
        if number in self._failed:
            raise _refuse(self._failed[number])
        taken = self.stream.intersection(op.inputs)
        for tensor in list(taken):
            entry = self._gathered_at(tensor, number)
            if entry is not None:
                self.plan.entries.add(entry)
                taken.discard(tensor)
        if number in self._flow.sums:
            self._leave(number, op)
        elif taken and self._flow.mixes(number):
            raise _refuse(
                f"{op.name} in {op.module or 'the model'} reads divided activations that it cannot gather"
            )
        elif taken:
            self.plan.ops.add(number)
            _check_op(self._trace, op, taken, self._shape)
            self.stream.update(op.outputs)
            if number not in self._unscattered:
                self.plan.stream.update((number, tensor) for tensor in op.outputs)
            for tensor in set(op.inputs) - self.stream:
                if self._flow.needs_gradient(tensor):
                    # Each rank would have an addend of its gradient.
                    raise _refuse(
                        f"{op.name} in {op.module or 'the model'} combines a part of the sequence with a "
                        "whole tensor that depends on parameters"
                    )
                names = self._trace.names
                self.plan.partial |= {names[source] for source in self._flow.learned.get(tensor, ())}

    def find_whole(self, number: int, blocks: list[ModuleCall]) -> str | None:
        """Return the kind of the smallest module around an operation that can run on the whole sequence."""
        outer = {call.module for call in blocks}
        around = [c for c in self._trace.calls if c.first <= number < c.last and c.module not in outer]
        inside = [c for c in around if any(b.first <= c.first and c.last <= b.last for b in blocks)]
        able = [c for c in sorted(inside, key=lambda c: c.last - c.first) if self._can_gather(c)]
        return collapse(able[0].module) if able else None

    def _can_gather(self, call: ModuleCall) -> bool:
        ops = self._trace.ops[call.first : call.last]
        made = {tensor for op in ops for tensor in op.outputs}
        read = (self.stream - made).intersection(tensor for op in ops for tensor in op.inputs)
        ends = [*read, *call.outputs[:1]]
        # A rank's part of a width cannot be joined with rows of another's; and gradients of whole rows that
        # an entry around the module sums would be those of other rows on each rank.
        if self._flow.cut.intersection(ends) or read & self._entered_outside(call):
            return False
        return (
            sum(other.module == call.module for other in self._trace.calls) == 1
            and bool(read)
            and read <= set(call.inputs.values())
            and bool(made.intersection(call.outputs[:1]))
            and all(self._trace.shapes[tensor][: DIM + 1] == self._shape[: DIM + 1] for tensor in ends)
            and all(len(self._trace.shapes[tensor]) > DIM + 1 for tensor in ends)
            and not any(end.module == call.module and not end.keys for end in self._flow.entries)
        )

    def _entered_outside(self, call: ModuleCall) -> set[int]:
        """Return the tensors, and their views, whose gradients are summed at an entry outside of a module."""
        found: set[int] = set()
        for entry, at in self._entries:
            if entry.keys and at.first <= call.first and call.last <= at.last and at is not call:
                found.update(at.inputs[key] for key in entry.keys)
            elif not entry.keys and not f"{entry.module}.".startswith(f"{call.module}."):
                found.add(at.outputs[entry.number])
        for op in self._trace.ops[: call.first]:
            if is_view(op) and found.intersection(op.inputs):
                found.update(op.outputs)
        return found

    def _gather_around(self, call: ModuleCall) -> None:
        for tensor in self.stream.intersection(call.inputs.values()):
            keys = tuple(key for key, number in call.inputs.items() if number == tensor)
            self.plan.whole.append(CutBoundary(call.module, keys))
        self.stream.add(call.outputs[0])
        self._until = call.last

    def _gathered_at(self, tensor: int, number: int) -> CutBoundary | None:
        """Return the entry through which an operation gets a tensor, or `None`."""
        for entry, call in self._entries:
            if entry.keys:
                if call.first <= number < call.last and tensor in (call.inputs[key] for key in entry.keys):
                    return entry
            elif call.outputs[entry.number] == tensor and number >= call.last:
                return entry
        return None

    def _leave(self, number: int, op: TracedOp) -> None:
        """Record a sum, which is part of the stream again once it is scattered."""
        leaving = self._flow.exit_of[number]
        self.stream.update(op.outputs)
        self.plan.exits.add(leaving)
        self.plan.ops.add(number)
        if leaving.spot is not None:
            if len(self._trace.shapes[self._calls[(leaving.module, leaving.spot)].outputs[0]]) < 3:
                raise _refuse(f"{op.module or 'the model'} sums over ranks after flattening its activations")
            if len(op.inputs) == 3:
                names = self._trace.names
                self.plan.partial |= {names[n] for n in self._flow.learned.get(op.inputs[0], ())}
        elif getattr(self._modules[op.module], "bias", None) is not None:
            self.plan.partial.add(f"{op.module}.bias")


def _check_op(trace: Trace, op: TracedOp, taken: set[int], shape: tuple[int, ...]) -> None:
    """Raise unless an operation treats every position of the sequence by itself."""
    batch, length = shape[0], shape[DIM]
    for tensor in taken:
        found = trace.shapes[tensor]
        place, outer = (DIM, 1) if found[:2] == (batch, length) else (0, batch)
        if found[place] % (outer * length) or not keeps_apart(trace, op, tensor, place, outer, length):
            where = f"{op.name} in {op.module or 'the model'}"
            raise _refuse(f"{where} may combine several positions of the sequence")


def collapse(name: str) -> str:
    """Return a module's name without the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def rehearse(plan: Sequence, num_ranks: int) -> list[Detour]:
    """Return detours that do what the hooks of a plan will do, on one rank and with shapes only."""

    def take(tensor: Tensor) -> Tensor:
        return tensor.chunk(num_ranks, DIM)[0].contiguous()

    def gather(tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * num_ranks, DIM)

    return [
        *(Detour(stretch.first, stretch.keys, take) for stretch in plan.stretches),
        *(Detour(taken.module, taken.keys, gather) for taken in plan.whole),
        *(Detour(name, (), take) for name in dict.fromkeys(taken.module for taken in plan.whole)),
        *(Detour(e.module, e.keys, gather, number=e.number) for e in plan.entries),
        *(Detour(leaving.module, (), take, leaving.spot) for leaving in plan.exits),
        *(Detour(stretch.last, (), gather) for stretch in plan.stretches),
    ]


def mismatch_error(reason: str) -> PacelineError:
    """Return the error for code that does not work on a part of the sequence."""
    return _refuse(reason)


def _refuse(saw: str) -> PacelineError:
    return PacelineError(
        "PL464",
        saw=f"sequence=true: {saw}.",
        rule="Blocks must pass on one tensor [batch, length, width]. What combines its positions must stand "
        "in a module of the block that takes and returns this tensor.",
        fix="Leave sequence out.",
    )
