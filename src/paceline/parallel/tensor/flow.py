"""Finds where cut tensors begin and end in a forward, in terms of modules that a hook can reach."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from paceline.parallel.tensor.calls import CallSite
from paceline.parallel.tensor.sums import is_plain_lookup
from paceline.parallel.tensor.trace import ModuleCall, Trace, TracedOp, Written, words

# Operations that only view a tensor: the facts about all uses of their result hold for them.
_SHAPES = frozenset(
    words(
        "view _unsafe_view reshape _reshape_alias t transpose permute expand unsqueeze squeeze clone "
        "contiguous _to_copy to detach alias flatten unflatten slice split chunk split_with_sizes "
        "select"
    )
)


class UnreachableError(Exception):
    """The error for an entry or exit that is no module's input or output."""


@dataclass(frozen=True)
class CutBoundary:
    """A place where a whole activation meets cut tensors.

    Attributes:
        module: full name.
        keys: the arguments of its call (places or keywords) that are this tensor; empty for an output.
        number: of this output among the tensors that the module returns.
    """

    module: str
    keys: tuple[int | str, ...]
    number: int = 0


@dataclass(frozen=True)
class Exit:
    """A place where ranks hold addends.

    Attributes:
        module: full name.
        kind: `"linear"`: a layer that runs torch's own forward, whose bias must be added after the sum;
            `"lookup"`: a layer whose table is divided by rows over ranks; `"output"`: the module's output is
            the sum; `"call"` and `"lookup call"`: a call in the module's own forward returns the sum.
        spot: that call.
    """

    module: str
    kind: str
    spot: CallSite | None = None


class Uses:
    """The uses of each tensor in a forward, independent of what is cut.

    Attributes:
        of: by number of a tensor, the numbers of the operations that take it.
        learned: by number of a tensor, the numbers of the parameters that it was computed from.
        computed: numbers of the tensors that are computed from anything other than parameters too.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.of: dict[int, list[int]] = defaultdict(list)
        for number, op in enumerate(trace.ops):
            for tensor in dict.fromkeys(() if op.is_outside else op.inputs):
                self.of[tensor].append(number)
        self.learned: dict[int, frozenset[int]] = {n: frozenset((n,)) for n in trace.parameters}
        self.computed = {number for number in trace.shapes if number not in trace.parameters}
        for op in trace.ops:
            found = [self.learned[number] for number in op.inputs if number in self.learned]
            sources = frozenset[int]().union(*found)
            for number in op.outputs:
                if trace.dtypes[number].is_floating_point or trace.dtypes[number].is_complex:
                    self.learned[number] = self.learned.get(number, frozenset()) | sources
                if op.inputs and not any(tensor in self.computed for tensor in op.inputs):
                    self.computed.discard(number)


class Flow:
    """The entries and exits of a forward in which some tensors are cut.

    Args:
        modules: by full name.
        cut: numbers of the cut tensors.
        sums: numbers of the operations that produce an addend.
        lookups: numbers of the operations that look up a table that is cut by rows.

    Attributes:
        entries, exits: in order of execution, each once.
        partial: whole parameters that meet cut tensors.
        exit_of: by number of an operation that produces an addend, its exit.
        ends: tensors that leave the model.
        learned: by number of a tensor, the numbers of the parameters that it was computed from.

    Raises:
        UnreachableError: if no hook can reach an entry or exit.
    """

    def __init__(
        self,
        uses: Uses,
        modules: Mapping[str, nn.Module],
        cut: set[int],
        sums: set[int],
        lookups: set[int],
    ) -> None:
        self._trace, self._modules, self.cut = uses.trace, modules, cut
        self.sums, self.lookups = sums, lookups
        self._uses, self.learned, self._computed = uses.of, uses.learned, uses.computed
        returned = {n for call in uses.trace.calls if call.module == "" for n in call.outputs}
        self.ends = {*uses.trace.outputs, *returned, *uses.trace.leaving}
        self._memo: dict[tuple[int, int], bool] = {}
        self.exit_of = self._find_exits()
        self.exits = list(dict.fromkeys(self.exit_of.values()))
        self.partial = self._find_partial()
        self.entries = list(dict.fromkeys(self._find_entries()))

    def mixes(self, number: int) -> bool:
        """Return whether an operation uses cut tensors so that its other inputs get partial gradients."""
        op = self._trace.ops[number]
        if number in self.lookups or op.is_outside:
            return False
        return any(tensor in self.cut for tensor in (*op.inputs, *op.outputs))

    def enters(self, tensor: int, number: int) -> bool:
        """Return whether one use of a whole tensor gives it only a part of its gradient."""
        if (tensor, number) in self._memo:
            return self._memo[(tensor, number)]
        op = self._trace.ops[number]
        if self.mixes(number):
            # A rank computes with its part only, so the input gets an addend of its gradient. Not the bias of
            # a sum: it is added after the sum, on every rank.
            entering = not (number in self.sums and len(op.inputs) == 3 and tensor == op.inputs[0])
        elif op.name in _SHAPES and len(op.outputs) and not op.name.endswith("_"):
            # A view only passes its gradient on. If all uses of its results enter, so does the view, and one
            # hook in front of it serves them all.
            results = [output for output in op.outputs if output != tensor]
            uses = [(result, use) for result in results for use in self._uses[result]]
            entering = bool(uses) and all(self.enters(result, use) for result, use in uses)
            entering = entering and self.ends.isdisjoint(results)
        else:  # every rank computes the same with it, and gets the whole gradient
            entering = False
        self._memo[(tensor, number)] = entering
        return entering

    def _find_entries(self) -> list[CutBoundary]:
        found: list[CutBoundary] = []
        lifted = {
            output
            for number, op in enumerate(self._trace.ops)
            if op.name in _SHAPES
            and op.inputs
            and self.enters(op.inputs[0], number)
            and not self.mixes(number)
            for output in op.outputs
        }
        for tensor in list(self._uses):
            if tensor in self.cut or tensor in lifted or not self.needs_gradient(tensor):
                continue
            entering = [use for use in self._uses[tensor] if self.enters(tensor, use)]
            if entering:
                found += self._place(tensor, entering)
        self._check_every_call(found)
        return found

    def needs_gradient(self, tensor: int) -> bool:
        """Return whether a tensor is an activation that depends on some parameter."""
        return bool(self.learned.get(tensor)) and tensor in self._computed

    def _place(self, tensor: int, entering: list[int]) -> list[CutBoundary]:
        """Return the fewest module inputs, from outside to inside, that pass the tensor to all these uses."""
        missing = set(entering)
        found: list[CutBoundary] = []
        for call in self._trace.calls:
            keys = [key for key, number in call.inputs.items() if number == tensor]
            inside = [use for use in self._uses[tensor] if call.first <= use < call.last]
            # A hook on this input changes all uses inside the call, so each of them must be one of `missing`.
            if not keys or not missing.intersection(inside) or not missing.issuperset(inside):
                continue
            if tensor in call.outputs:  # returned unused: its gradient comes from outside as well
                continue
            found.append(CutBoundary(call.module, tuple(keys)))
            missing.difference_update(inside)
        producers = [call for call in self._trace.calls if tensor in call.outputs]
        only_enters = set(entering) == set(self._uses[tensor]) and tensor not in self.ends
        # If every use enters, one hook on the output of the innermost module that returns it suffices. Uses
        # in that module itself get the tensor before the hook does.
        if missing and producers and only_enters and not found and producers[-1].last <= min(missing):
            return [CutBoundary(producers[-1].module, (), producers[-1].outputs.index(tensor))]
        for use in sorted(missing):
            if self.mixes(use):
                where = self._trace.ops[use].module or "the model"
                raise UnreachableError(f"its input in {where} is no module's input")
            # A view of the tensor may be an input although the tensor itself is none.
            results = [n for n in self._trace.ops[use].outputs if n != tensor]
            found += [entry for n in results for entry in self._place(n, self._uses[n])]
        return found

    def _check_every_call(self, entries: list[CutBoundary]) -> None:
        """Raise unless a module that is called several times has the same entries in each call."""
        calls: dict[str, int] = defaultdict(int)
        for call in self._trace.calls:
            calls[call.module] += 1
        placed: dict[CutBoundary, int] = defaultdict(int)
        for entry in entries:
            placed[entry] += 1
        for entry, count in placed.items():
            if calls[entry.module] != count:
                raise UnreachableError(
                    f"{entry.module} is called {calls[entry.module]} times, {count} of them with cut tensors"
                )

    def _find_partial(self) -> set[str]:
        """Return whole parameters that meet cut tensors; raise unless all of their uses do."""
        found: set[str] = set()
        for number, op in enumerate(self._trace.ops):
            for tensor in op.inputs:
                if tensor in self.cut or tensor in self._computed or not self.learned.get(tensor):
                    continue
                if not (self.mixes(number) and self.enters(tensor, number)):
                    continue
                if not self._only_enters(tensor):
                    raise UnreachableError(
                        f"{self._trace.names.get(tensor, 'a parameter')} meets cut and whole tensors"
                    )
                found |= {self._trace.names[source] for source in self.learned[tensor]}
        return found

    def _only_enters(self, tensor: int) -> bool:
        sources = self.learned[tensor]
        return all(
            number not in self.ends and self.enters(number, use)
            for number, learned in self.learned.items()
            if number not in self._computed and learned & sources and number not in self.cut
            for use in self._uses[number]
        )

    def find_used_elsewhere(self, names: set[str], ops: set[int]) -> str | None:
        """Return one of some parameters that is also used outside of these operations, and not with parts."""
        sources = {number for number, name in self._trace.names.items() if name in names}
        for number, learned in self.learned.items():
            if number in self._computed or not learned & sources:
                continue
            outside = [use for use in self._uses[number] if use not in ops and not self.mixes(use)]
            made = {output for use in outside for output in self._trace.ops[use].outputs}
            if number in self.ends or made & self._computed:
                return self._trace.names[min(learned & sources)]
        return None

    def _find_exits(self) -> dict[int, Exit]:
        found: dict[int, Exit] = {}
        for number in sorted(self.lookups):
            found[number] = self._find_lookup(number)
        for number in sorted(self.sums):
            found[number] = self._find_exit(number)
        self._check_every_exit(found)
        return found

    def _find_lookup(self, number: int) -> Exit:
        op = self._trace.ops[number]
        module = self._modules[op.module]
        if runs_own_forward(module, nn.Embedding) and not op.is_hooked:
            assert isinstance(module, nn.Embedding)
            if module.max_norm is None and not module.sparse and not module.scale_grad_by_freq:
                return Exit(op.module, "lookup")
        else:
            call = self._find_written(number)
            if call is not None and call.func is F.embedding and is_plain_lookup(call.args, call.kwargs):
                return Exit(call.module, "lookup call", call.spot)
        raise UnreachableError(f"the table of {op.module or 'the model'} is not only read")

    def _find_exit(self, number: int) -> Exit:
        op = self._trace.ops[number]
        module = self._modules[op.module]
        if is_linear(module) and not op.is_hooked:
            return Exit(op.module, "linear")
        call = next((c for c in reversed(self._trace.calls) if c.first <= number < c.last), None)
        # With a bias (a third input), the output is already addend plus bias, and summing it would count the
        # bias once per rank.
        if call is not None and len(op.inputs) == 2 and len(call.outputs) == 1 and self._gives(number, call):
            return Exit(op.module, "output")
        written = self._find_written(number)
        if written is not None and self._is_sum(number, written):
            return Exit(written.module, "call", written.spot)
        raise UnreachableError(f"the sum in {op.module or 'the model'} is at no place that can be changed")

    def _find_written(self, number: int) -> Written | None:
        return next((call for call in self._trace.written if call.first <= number < call.last), None)

    def _is_sum(self, number: int, call: Written) -> bool:
        """Return whether a call of a function of torch returns exactly this sum, with a bias at most."""
        if self.sums.intersection(range(call.first, call.last)) != {number}:
            return False
        if call.func is F.linear:
            return True
        if call.func is torch.addmm:
            return len(call.args) == 3 and not call.kwargs
        return "out" not in call.kwargs and self._gives(number, call)

    def _gives(self, number: int, call: ModuleCall | Written) -> bool:
        """Return whether a call returns this sum, possibly viewed, and nothing else in it uses the sum."""
        # What a module keeps of its output, and what a hook inside of it sees, is this rank's addend.
        if isinstance(call, ModuleCall) and not self._trace.leaving.keys().isdisjoint(call.outputs):
            return False
        tensor = self._trace.ops[number].outputs[0]
        while tensor not in call.outputs:
            uses = self._uses[tensor]
            if len(uses) != 1 or self._trace.ops[uses[0]].name not in _SHAPES or uses[0] >= call.last:
                return False
            tensor = self._trace.ops[uses[0]].outputs[0]
        return True

    def _check_every_exit(self, exits: Mapping[int, Exit]) -> None:
        """Raise unless a changed call produces a sum in each of its module's forwards."""
        for leaving in dict.fromkeys(exits.values()):
            if leaving.spot is None:
                continue
            calls = [c for c in self._trace.written if (c.module, c.spot) == (leaving.module, leaving.spot)]
            if len(calls) != sum(found == leaving for found in exits.values()):
                raise UnreachableError(f"{leaving.module or 'the model'} is also called without cut tensors")


def is_view(op: TracedOp) -> bool:
    """Return whether an operation only views or copies a tensor."""
    return op.name in _SHAPES


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is torch's linear layer or GPT-2's Conv1D, which holds its weight transposed.

    It must run the forward of its class: a subclass or a patched instance may compute something else.
    """
    kind = type(module)
    is_transposed = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return runs_own_forward(module, nn.Linear) or (is_transposed and "forward" not in module.__dict__)


def runs_own_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module's forward is the one that torch wrote for the class `kind`."""
    forward = type(module).forward
    is_torchs = forward.__module__ == kind.__module__ and forward.__qualname__ == f"{kind.__name__}.forward"
    return is_torchs and forward is kind.forward and "forward" not in module.__dict__


def find_runs(calls: Iterable[ModuleCall]) -> list[list[ModuleCall]]:
    """Return the runs of consecutive blocks in which each takes the output of the one before.

    What a decoder's first block gets from the encoder's last one beside its own input does not join them.
    """
    runs: list[list[ModuleCall]] = []
    for call in calls:
        last = runs[-1][-1] if runs else None
        taken = list(call.inputs.values())
        if last is not None and last.module.rpartition(".")[0] != call.module.rpartition(".")[0]:
            taken = taken[:1]
        if last is not None and last.outputs and last.outputs[0] in taken:
            runs[-1].append(call)
        else:
            runs.append([call])
    return runs
