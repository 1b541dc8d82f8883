"""Sequence parallelism: each rank has a part of the sequence between the parts of a block that tp splits.

Without it, all ranks of tp compute the same norms, dropouts and residual sums, and keep the same activations
for backward. With it, a stretch of blocks passes on [batch, length / ranks, width]. An entry gathers the
sequence; an exit sums and scatters it (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4.2.2). The bytes sent are those of the all-reduces that they replace.

Outside of entries and exits, operations must treat every position of the sequence by itself. That is checked
operation by operation in the trace. An operation that is not known to do so is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.parallel.tensor.flow import CutBoundary, Exit, Flow, find_runs
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
        stream: numbers of the tensors in the trace that are cut along the sequence.
    """

    stretches: list[SequenceStretch] = field(default_factory=list)
    entries: set[CutBoundary] = field(default_factory=set)
    exits: set[Exit] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)
    draws: set[str] = field(default_factory=set)
    stream: set[int] = field(default_factory=set)


def plan_sequence(
    trace: Trace, flow: Flow, modules: Mapping[str, nn.Module], blocks: list[str], num_ranks: int
) -> Sequence:
    """Find the stretches of a model and check them.

    Args:
        trace: the forward.
        flow: entries and exits of the plan.
        modules: by full name.
        blocks: names of the repeated blocks.
        num_ranks: degree of tp.

    Raises:
        PacelineError: PL464 if the sequence cannot be cut.
    """
    plan = Sequence()
    calls = {call.module: call for call in trace.calls if call.module in set(blocks)}
    if len(calls) != sum(call.module in set(blocks) for call in trace.calls):
        raise _refuse("a block is called more than once in a forward")
    for stretch in find_runs(calls[name] for name in blocks if name in calls):
        _read_stretch(trace, flow, modules, stretch, num_ranks, plan)
    for tensor, how in trace.leaving.items():
        if tensor in plan.stream:
            raise _refuse(f"a part of the sequence leaves the model: {how}")
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
) -> None:
    first, last = calls[0], calls[-1]
    keys = tuple(first.inputs) if len(first.inputs) == 1 else _stream_keys(calls)
    if not keys or not last.outputs:
        raise _refuse(f"{first.module} does not take one tensor and return one")
    stream = {first.inputs[keys[0]]}
    shape = trace.shapes[first.inputs[keys[0]]]
    if len(shape) != 3 or shape[DIM] % num_ranks:
        shown = "x".join(map(str, shape))
        raise _refuse(
            f"{first.module} takes {shown}, whose dimension {DIM} is not divisible by {num_ranks} ranks"
        )
    inside = [n for call in calls for n in range(call.first, call.last)]
    walk = _Walk(trace, flow, modules, shape, stream, plan)
    for number in inside:
        walk.pass_op(number)
    if last.outputs[0] not in stream:
        raise _refuse(f"{last.module} does not return the tensor that passed through it")
    plan.stretches.append(SequenceStretch(first.module, keys, last.module))
    plan.draws |= {key for key, number in trace.drawn.items() if number in stream}


def _stream_keys(calls: list[ModuleCall]) -> tuple[int | str, ...]:
    """Return the arguments in which the second block gets the first one's output; the first uses the same."""
    if len(calls) < 2:
        return tuple(key for key in calls[0].inputs if key in (0, "hidden_states", "x", "src"))[:1]
    return tuple(key for key, number in calls[1].inputs.items() if number == calls[0].outputs[0])


class _Walk:
    """A walk that follows the stream through a stretch, and adds what it finds to the plan.

    Attributes:
        stream: numbers of the tensors that are cut along the sequence when they are used, and of the sums
            that are scattered into them.
    """

    def __init__(
        self,
        trace: Trace,
        flow: Flow,
        modules: Mapping[str, nn.Module],
        shape: tuple[int, ...],
        stream: set[int],
        plan: Sequence,
    ) -> None:
        self.stream = stream
        self._trace, self._flow, self._modules = trace, flow, modules
        self._calls = {(call.module, call.spot): call for call in trace.written}
        self._shape, self._plan = shape, plan
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
        taken = self.stream.intersection(op.inputs)
        for tensor in list(taken):
            entry = self._gathered_at(tensor, number)
            if entry is not None:
                self._plan.entries.add(entry)
                taken.discard(tensor)
        if number in self._flow.sums:
            self._leave(number, op)
        elif taken and self._flow.mixes(number):
            raise _refuse(
                f"{op.name} in {op.module or 'the model'} reads divided activations that it cannot gather"
            )
        elif taken:
            _check_op(self._trace, op, taken, self._shape)
            self.stream.update(op.outputs)
            if number not in self._unscattered:
                self._plan.stream.update(op.outputs)
            for tensor in set(op.inputs) - self.stream:
                if self._flow.needs_gradient(tensor):
                    # Each rank would have an addend of its gradient.
                    raise _refuse(
                        f"{op.name} in {op.module or 'the model'} combines a part of the sequence with a "
                        "whole tensor that depends on parameters"
                    )
                names = self._trace.names
                self._plan.partial |= {names[source] for source in self._flow.learned.get(tensor, ())}

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
        self._plan.exits.add(leaving)
        if leaving.spot is not None:
            if len(self._trace.shapes[self._calls[(leaving.module, leaving.spot)].outputs[0]]) < 3:
                raise _refuse(f"{op.module or 'the model'} sums over ranks after flattening its activations")
            if len(op.inputs) == 3:
                names = self._trace.names
                self._plan.partial |= {names[n] for n in self._flow.learned.get(op.inputs[0], ())}
        elif getattr(self._modules[op.module], "bias", None) is not None:
            self._plan.partial.add(f"{op.module}.bias")


def _check_op(trace: Trace, op: TracedOp, taken: set[int], shape: tuple[int, ...]) -> None:
    """Raise unless an operation treats every position of the sequence by itself."""
    batch, length = shape[0], shape[DIM]
    for tensor in taken:
        found = trace.shapes[tensor]
        place, outer = (DIM, 1) if found[:2] == (batch, length) else (0, batch)
        if found[place] % (outer * length) or not keeps_apart(trace, op, tensor, place, outer, length):
            where = f"{op.name} in {op.module or 'the model'}"
            raise _refuse(f"{where} may combine several positions of the sequence")


def rehearse(plan: Sequence, num_ranks: int) -> list[Detour]:
    """Return detours that do what the hooks of a plan will do, on one rank and with shapes only."""

    def take(tensor: Tensor) -> Tensor:
        return tensor.chunk(num_ranks, DIM)[0].contiguous()

    def gather(tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * num_ranks, DIM)

    return [
        *(Detour(stretch.first, stretch.keys, take) for stretch in plan.stretches),
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
        rule="Outside of what tp splits, blocks must pass on one tensor [batch, length, width] and treat "
        "every position of it independently.",
        fix="Leave sequence out.",
    )
