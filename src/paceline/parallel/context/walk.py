"""Decides where the sequence of a model is divided over cp, from one trial forward.

A run of blocks (a stretch) passes on rows: some positions of every sequence. Outside of attention, an
operation must treat every position by itself. Attention needs all positions, and works head by head: there
rows are exchanged for heads, at the outputs of the projections (`to_heads`), and back at the input of the
output projection (`to_rows`). In between, any code runs on whole sequences with fewer heads: masks,
positions, biases and sliding windows are those of one process. A mixture of experts gets whole sequences
(`whole_modules.py`).

Which dimension holds the heads follows from the classes of dimensions that tp uses (`tensor/rules.py`). Sizes
that the code between takes from a number of the module, or from its input's length, are changed in the calls
in which the trial forward found them. Then the forward runs once more on the shapes of one rank, and every
operation must have the planned shape. What does not fit is refused by name.

Parameters are whole on every rank. Those that see rows or some heads have a part of their gradient on each
rank (`ContextPlan.partial`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import nn

from paceline.parallel.blocks import find_blocks
from paceline.parallel.context.context_plan import ContextPlan, Crossing, Stretch
from paceline.parallel.context.refusals import cannot_divide_error, refused_op_error, too_short_error
from paceline.parallel.context.whole_modules import WholeCalls, plan_whole
from paceline.parallel.split import Split
from paceline.parallel.tensor.atoms import Atom, Dim, leaves
from paceline.parallel.tensor.calls import CallSite, find_operand
from paceline.parallel.tensor.flow import Uses, find_runs, is_linear, runs_own_forward
from paceline.parallel.tensor.rules import Dims, atoms_of, keeps_apart
from paceline.parallel.tensor.trace import ModuleCall, Trace, TracedOp, Written
from paceline.torch_seams.attention_ops import ATTENTION_OPS

_BATCHED = frozenset({"bmm", "baddbmm"})
_CONSTANTS = frozenset(f"{new}{name}" for new in ("", "new_") for name in ("zeros", "ones", "full", "empty"))
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


@dataclass
class Boundary:
    """A call, of a module or in a module's forward, that takes or returns heads."""

    kind: str
    call: ModuleCall | Written
    module: str
    spot: CallSite | None
    split: Split
    takes: int
    keys: tuple[int | str, ...]
    gives: int


class Walk:
    """A walk through a trial forward that follows rows and heads, and adds what it finds to a plan.

    Attributes:
        num_ranks: degree of cp.
        tp: degree of tp, which divides the same heads first.
        by: how ranks attend, as in the plan.
        plan: grows.
        rows: by number of a tensor, the stretch whose rows it has.
        heads: by number of a tensor whose heads are divided over ranks, how they are cut.
        made_as_rows: by number of a tensor that is exchanged or joined, the stretch whose rows it has before.
        taken: tensors that are made whole, before a rank takes its heads.
        stretch_at: by number of an operation, the stretch that it is in.
        whole: the calls of modules that need the whole sequence.
        made_whole: tensors that are made whole over all positions before a rank takes its rows.
        block_names: full names of the blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        num_ranks: int,
        trace: Trace,
        dims: Dims,
        tp: int = 1,
        by: str = "heads",
        mixtures: Sequence[str] = (),
    ) -> None:
        self.trace, self.dims, self.num_ranks = trace, dims, num_ranks
        self._tp = tp
        self.plan = ContextPlan(num_ranks, by)
        self.model = model
        self._modules = dict(model.named_modules())
        self._uses = Uses(trace)
        self.whole = WholeCalls(trace, mixtures)
        self._stretches = self._find_stretches()
        # By number of a tensor, the stretch whose rows it has; and how heads are cut, if any are.
        self.rows: dict[int, int] = {}
        self.heads: dict[int, Split] = {}
        self.stretch_at: dict[int, int] = {}  # by number of an operation
        self._part_ops: set[int] = set()  # operations on rows or heads
        # Tensors that a boundary makes, before they are exchanged.
        self.made_as_rows: dict[int, int] = {}
        self._atoms = {number: atoms_of(dims, number) for number in trace.shapes}
        self._held: dict[Atom, set[int]] = defaultdict(set)
        for number, found in self._atoms.items():
            for _, _, atom in found:
                self._held[atom].add(number)
        self._produced = trace.list_produced()
        self._chosen: dict[int, tuple[int, int]] = {}  # by number of a tensor: dimension, outer
        self.dims_of: dict[int, int] = {}  # by number of a stretch
        self.streams: dict[int, int] = {}  # by number of a stretch: the tensor that enters it
        self.taken: set[int] = set()  # made whole, before a rank takes its heads
        self.made_whole: set[int] = set()
        self.block_names = {call.module for calls in self._stretches for call in calls}

    # ---- stretches

    def _find_stretches(self) -> list[list[ModuleCall]]:
        names = [name for name, _ in find_blocks(self.model) if name]
        calls: dict[str, ModuleCall] = {}
        for call in self.trace.calls:
            if call.module in set(names):
                if call.module in calls:
                    raise cannot_divide_error(f"{call.module} is called more than once in a forward")
                calls[call.module] = call
        runs = find_runs(calls[name] for name in names if name in calls)
        if not runs:
            raise cannot_divide_error(
                f"{type(self.model).__name__} has no repeated blocks, between which sequences are divided"
            )
        return runs

    def _stream(self, calls: list[ModuleCall]) -> tuple[int | str, ...]:
        first = calls[0]
        if len(calls) > 1:
            before = calls[0].outputs[0] if calls[0].outputs else None
            keys = tuple(key for key, number in calls[1].inputs.items() if number == before)
            keys = tuple(key for key in keys if key in first.inputs)
        else:
            keys = tuple(first.inputs)[:1]
        if not keys or not calls[-1].outputs:
            raise cannot_divide_error(f"{first.module} does not take a tensor and return one")
        return keys

    # ---- heads

    def _choose_heads(self, first: int, last: int) -> None:
        """Choose, for every operation that combines positions, a dimension of heads to cut."""
        for number in range(first, last):
            op = self.trace.ops[number]
            if not self._combines(op) or number in self.whole.ops:
                continue
            place = 1 if op.name in ATTENTION_OPS else 0
            tensor = op.inputs[0] if op.name in ATTENTION_OPS else op.outputs[0]
            found = leaves(self.dims[tensor][place])
            if any(atom in self._cut_atoms for atom in found):
                continue
            fitting = [atom for atom in found if self._can_cut(atom)]
            if not fitting:
                raise self._no_heads(op, found)
            self._cut(fitting[0])

    @property
    def _cut_atoms(self) -> set[Atom]:
        return {
            atom
            for number in self._chosen
            for place, outer, atom in self._atoms[number]
            if self._chosen[number] == (place, outer)
        }

    def _combines(self, op: TracedOp) -> bool:
        """Return whether an operation multiplies activations of several positions."""
        if op.name in ATTENTION_OPS:
            return True
        if op.name not in _BATCHED:
            return False
        operands = op.inputs[-2:]
        return all(tensor in self._uses.computed for tensor in operands)

    def _can_cut(self, atom: Atom) -> bool:
        if atom.pinned or atom.size % (self.num_ranks * self._tp):
            return False
        for number in self._held[atom]:
            if sum(other is atom for _, _, other in self._atoms[number]) > 1 or number in self._chosen:
                return False
            if number not in self.trace.names and number not in self._produced:
                return False  # a tensor of the batch has this dimension
        return True

    def _cut(self, atom: Atom) -> None:
        for number in self._held[atom]:
            place, outer = next((p, o) for p, o, other in self._atoms[number] if other is atom)
            self._chosen[number] = (place, outer)

    def _no_heads(self, op: TracedOp, found: Dim) -> Exception:
        sizes = [atom.size for atom in found]
        reasons = "; ".join(dict.fromkeys(atom.pinned for atom in found if atom.pinned))
        where = op.module or "the model"
        heads = " x ".join(map(str, sizes)) or "1"
        why = f" ({reasons})" if reasons else ""
        among = f" on each of {self._tp} ranks of tp" if self._tp > 1 else ""
        return cannot_divide_error(
            f"the attention in {where} has heads {heads} (with key and value heads that several query heads "
            f"share counted apart), which cannot be divided by {self.num_ranks}{among}{why}",
            fix=f"Choose a cp that divides the key and value heads of {where}, or use dp_shard or tp.",
        )

    def split(self, number: int) -> Split:
        place, outer = self._chosen[number]
        return Split(place, outer, self.num_ranks, "cp")

    # ---- boundaries

    def _find_boundaries(self, first: int, last: int) -> dict[int, Boundary]:
        """Return the calls that take or return heads, by their first operation."""
        found: dict[int, Boundary] = {}
        for number in range(first, last):
            op = self.trace.ops[number]
            if op.name == "embedding":
                if op.inputs[0] in self._chosen and op.outputs[0] in self._chosen:
                    boundary = self._reach(number, "take_heads", op.outputs[0])
                    found.setdefault(boundary.call.first, boundary)
                continue
            if op.name not in _PRODUCTS or number in self.whole.ops:
                continue
            left, right = op.inputs[-2:]
            if right in self._uses.computed or right not in self._chosen:
                continue
            summed = any(atom in self._cut_atoms for atom in leaves(self.dims.products[number]))
            boundary = self._reach(
                number, "to_rows" if summed else "to_heads", left if summed else op.outputs[0]
            )
            found.setdefault(boundary.call.first, boundary)
        return found

    def _reach(self, number: int, kind: str, cut: int) -> Boundary:
        """Return the call at which the tensors of an operation can be changed."""
        op = self.trace.ops[number]
        module = self._modules[op.module]
        is_plain = is_linear(module) or runs_own_forward(module, nn.Embedding)
        if is_plain and not op.is_hooked:
            call = next(
                call
                for call in reversed(self.trace.calls)
                if call.module == op.module and call.first <= number < call.last
            )
            if len(call.inputs) == 1:
                keys = tuple(call.inputs)
                takes, gives = call.inputs[keys[0]], call.outputs[0]
                split = self.split(takes if kind == "to_rows" else gives)
                return Boundary(kind, call, op.module, None, split, takes, keys, gives)
        written = next((call for call in self.trace.written if call.first <= number < call.last), None)
        if written is not None and written.args and written.outputs:
            taken = self._taken_by(written)
            if taken is not None:
                split = self.split(taken if kind == "to_rows" else written.outputs[0])
                return Boundary(
                    kind, written, written.module, written.spot, split, taken, (), written.outputs[0]
                )
        raise cannot_divide_error(
            f"{op.name} in {op.module or 'the model'} projects to heads at a place that cannot be changed"
        )

    def _taken_by(self, call: Written) -> int | None:
        """Return the activation that a call in a module's forward takes."""
        place = find_operand(call.func)
        if call.func is F.embedding or place >= len(call.taken):
            return None
        return call.taken[place]

    # ---- the walk

    def walk(self) -> None:
        """Follow rows and heads through all stretches; raise PL630 for what they cannot pass."""
        for index, calls in enumerate(self._stretches):
            keys = self._stream(calls)
            stream = calls[0].inputs[keys[0]]
            first, last = calls[0].first, calls[-1].last
            shape = self.trace.shapes[stream]
            dim = self.dims_of[index] = self._find_sequence(first, last, stream)
            if len(shape) == 3 and shape[dim] < self.num_ranks:
                raise too_short_error(shape[dim], self.num_ranks)
            if len(shape) != 3:
                shown = "x".join(map(str, shape))
                raise cannot_divide_error(
                    f"{calls[0].module} takes a tensor {shown}, and not [batch, length, width]"
                )
            self._walk_stretch(index, first, last, stream)
            if self.rows.get(calls[-1].outputs[0]) != index:
                raise cannot_divide_error(
                    f"{calls[-1].module} does not return the tensor that passed through it"
                )
            self.plan.stretches.append(Stretch(calls[0].module, keys, calls[-1].module, dim))
            # From here on it is whole again.
            self.made_as_rows[calls[-1].outputs[0]] = self.rows.pop(calls[-1].outputs[0])
            self.rows.pop(stream)
            self._check_outside(index, last)
        places: dict[str, int] = {}
        changed: list[Any] = [*self.plan.crossings, *self.plan.attending, *self.plan.whole]
        for each in changed:
            if places.setdefault(each.module, each.stretch) != each.stretch:
                raise cannot_divide_error(f"{each.module} is called in several runs of blocks")
        self._check_leaving()
        self._check_gradients()
        self._find_draws()

    def _walk_stretch(self, index: int, first: int, last: int, stream: int) -> None:
        self.streams[index] = stream
        self._choose_heads(first, last)
        boundaries = self._find_boundaries(first, last)
        self.rows[stream] = index
        number = first
        while number < last:
            behind = self.pass_whole(index, number, last)
            if behind is not None:
                number = behind
                continue
            self.stretch_at[number] = index
            boundary = boundaries.get(number)
            if boundary is None:
                self._pass_op(index, number)
                number += 1
                continue
            self._cross(index, boundary)
            self._part_ops.update(range(boundary.call.first, boundary.call.last))
            self.stretch_at.update(dict.fromkeys(range(boundary.call.first, boundary.call.last), index))
            number = max(boundary.call.last, number + 1)

    def _find_sequence(self, first: int, last: int, stream: int) -> int:
        """Return the dimension of the sequence: 1, unless attention is over positions of dimension 0."""
        combined: set[Atom] = set()
        for number in range(first, last):
            op = self.trace.ops[number]
            if number in self.whole.ops:
                continue
            if op.name in ATTENTION_OPS:
                combined.update(leaves(self.dims[op.inputs[1]][2]))
            elif op.name in _BATCHED:
                combined.update(leaves(self.dims.products[number]))
        found = [dim for dim in (1, 0) if combined.intersection(leaves(self.dims[stream][dim]))]
        return found[0] if found else 1

    def list_ends(self, index: int) -> set[int]:
        """Return the tensors that the blocks of a stretch pass on."""
        return {call.outputs[0] for call in self._stretches[index] if call.outputs}

    def sequence(self, index: int) -> Dim:
        """Return the atoms of the positions of a stretch."""
        return leaves(self.dims[self.streams[index]][self.dims_of[index]])

    def length(self, index: int) -> int:
        """Return the length of a stretch's sequence in the trial."""
        return self.trace.shapes[self.streams[index]][self.dims_of[index]]

    def _cross(self, index: int, boundary: Boundary) -> None:
        where, takes, gives = boundary.module or "the model", boundary.takes, boundary.gives
        kind, is_summed = boundary.kind, False
        inside = range(boundary.call.first, boundary.call.last)
        self._add_partial(inside)
        if kind == "to_rows":
            if takes not in self.heads:
                raise cannot_divide_error(f"{where} sums over heads that are not cut")
            self.made_as_rows.update(dict.fromkeys(self._made(inside), index))
            self.rows[gives] = index
            dim = self._find_dim(index, takes, where)
        else:
            if takes in self.heads:
                raise cannot_divide_error(f"{where} takes some heads and returns some heads")
            if takes in self.rows:
                self.made_as_rows.update(dict.fromkeys(self._made(inside), index))
                dim = self._find_dim(index, gives, where)
                kind = "to_heads"
            else:
                kind, dim = "take_heads", 1
                self.taken |= self._made(inside)
                is_summed = bool(self._uses.learned.get(takes)) and takes in self._uses.computed
            self.heads[gives] = boundary.split
        self.plan.crossings.append(
            Crossing(
                boundary.module, kind, boundary.spot, boundary.keys, dim, boundary.split, index, is_summed
            )
        )

    def _made(self, inside: range) -> set[int]:
        """Return the activations that some operations make."""
        made = {n for at in inside for n in self.trace.ops[at].outputs}
        return made & self._uses.computed

    def _find_dim(self, index: int, tensor: int, where: str) -> int:
        """Return the dimension of a tensor that is the sequence of a stretch."""
        wanted = self.sequence(index)
        places = [place for place, dim in enumerate(self.dims[tensor]) if leaves(dim) == wanted]
        if len(places) != 1:
            shown = "x".join(map(str, self.trace.shapes[tensor]))
            raise cannot_divide_error(f"{where} has a tensor {shown} without a dimension of positions alone")
        return places[0]

    def _pass_op(self, index: int, number: int) -> None:
        op = self.trace.ops[number]
        rows = [tensor for tensor in op.inputs if tensor in self.rows]
        heads = [tensor for tensor in op.inputs if tensor in self.heads]
        where = f"{op.name} in {op.module or 'the model'}"
        if not op.inputs and op.name in _CONSTANTS and op.outputs[0] in self._chosen:
            self.heads[op.outputs[0]] = self.split(op.outputs[0])  # with the same value for every head
        if not rows and not heads:
            return
        self._part_ops.add(number)
        if rows and heads:
            raise cannot_divide_error(f"{where} combines some positions with some heads")
        if any(self.rows[tensor] != index for tensor in rows):
            raise cannot_divide_error(f"{where} reads a part of another sequence")
        for tensor in op.inputs:
            if tensor not in self.rows and tensor not in self.heads:
                self._check_whole(op, tensor, cut_heads=bool(heads))
        if heads:
            for output in op.outputs:
                if output not in self._chosen:
                    raise refused_op_error(op, "needs all heads at once")
                self.heads[output] = self.split(output)
            return
        wanted = self.sequence(index)
        for tensor in rows:
            if not keeps_apart(
                self.trace, op, tensor, *self.find_rows(tensor, wanted), math.prod(a.size for a in wanted)
            ):
                raise refused_op_error(op, "may combine several positions of the sequence")
        for output in op.outputs:
            self.rows[output] = index

    def pass_whole(self, index: int, number: int, last: int) -> int | None:
        """Plan the call of a module that needs the whole sequence, if one begins with an operation.

        Returns:
            The number of the first operation after it.
        """
        call = self.whole.by_first.get(number)
        whole = None if call is None else plan_whole(self, index, call, last)
        if call is None or whole is None:
            return None
        self.plan.whole.append(whole)
        given = {call.outputs[place] for place in whole.gives}
        self.rows.update(dict.fromkeys(given, index))
        self.made_whole |= given
        return call.last

    def find_rows(self, tensor: int, wanted: Dim) -> tuple[int, int]:
        """Return the dimension of the positions, and the product of the sizes outside of them there."""
        for place, dim in enumerate(self.dims[tensor]):
            outer, found = 1, leaves(dim)
            for start in range(len(found)):
                if found[start : start + len(wanted)] == wanted:
                    return place, outer
                outer *= found[start].size
        raise cannot_divide_error(
            f"a tensor {'x'.join(map(str, self.trace.shapes[tensor]))} has no dimension of positions"
        )

    def _check_whole(self, op: TracedOp, tensor: int, *, cut_heads: bool) -> None:
        """Record a whole tensor that meets parts; raise if its gradient could not be summed."""
        where = f"{op.name} in {op.module or 'the model'}"
        if cut_heads and tensor in self._chosen and tensor not in self.heads:
            raise cannot_divide_error(f"{where} uses a tensor of all heads together with some heads")
        if not self._uses.learned.get(tensor):
            return
        if tensor in self._uses.computed:
            raise cannot_divide_error(
                f"{where} combines a part of the sequence with a whole tensor that depends on parameters"
            )
        self._mark_partial(self._uses.learned[tensor])

    def _mark_partial(self, sources: frozenset[int]) -> None:
        self.plan.partial |= {
            self.trace.names[source] for source in sources if source in self.trace.parameters
        }

    def _add_partial(self, inside: range) -> None:
        for at in inside:
            for tensor in self.trace.ops[at].inputs:
                if tensor not in self._uses.computed:
                    self._mark_partial(self._uses.learned.get(tensor, frozenset()))

    # ---- checks of the whole

    def _check_outside(self, index: int, last: int) -> None:
        """Raise if a part leaves its stretch other than by the last block's output."""
        parts = {t for t, at in self.rows.items() if at == index} | set(self.heads)
        for op in self.trace.ops[last:]:
            for tensor in () if op.is_outside else op.inputs:
                if tensor in parts and self.trace.shapes[tensor]:
                    raise cannot_divide_error(
                        f"{op.name} in {op.module or 'the model'} uses a tensor from inside of the blocks"
                    )
        for tensor in self.trace.outputs:
            if tensor in parts:
                raise cannot_divide_error(
                    "the model returns a tensor from inside of its blocks",
                    fix="Do not return hidden states, attentions or caches (for models of transformers: "
                    "output_hidden_states, output_attentions and use_cache off), or set cp=1.",
                )

    def _check_leaving(self) -> None:
        """Raise if code outside of the model gets a part, or what has a part of its parameters' gradients."""
        names = {number for number, name in self.trace.names.items() if name in self.plan.partial}
        for tensor, how in self.trace.leaving.items():
            is_added = tensor not in self._uses.computed and self._uses.learned.get(tensor, names) & names
            # What is joined or exchanged at a module's output is still a part inside of that module.
            is_part = any(tensor in parts for parts in (self.rows, self.heads, self.made_as_rows))
            if is_added or is_part:
                raise cannot_divide_error(
                    f"a tensor from inside of the blocks leaves the model: {how}",
                    fix="Compute the loss from the model's output alone; detach what is only kept. Or "
                    "set cp=1.",
                )

    def _check_gradients(self) -> None:
        """Raise for a parameter that has a part of its gradient here and all of it there."""
        for number, op in enumerate(self.trace.ops):
            if op.is_outside:
                continue
            computed = any(tensor in self._uses.computed for tensor in (*op.inputs, *op.outputs))
            if number in self._part_ops or not computed:
                continue
            for tensor in op.inputs:
                if tensor in self._uses.computed:
                    continue
                for source in self._uses.learned.get(tensor, ()):
                    name = self.trace.names[source]
                    if name in self.plan.partial:
                        raise cannot_divide_error(
                            f"{name} is used on parts of the sequence and, in {op.module or 'the model'}, on "
                            "all of it"
                        )

    def _find_draws(self) -> None:
        for key, number in self.trace.drawn.items():
            if number in self.heads:
                at = next((c.stretch for c in self.plan.crossings), 0)
                self.plan.draws[key] = (at, self.heads[number])
            elif number in self.rows:
                index = self.rows[number]
                place, outer = self.find_rows(number, self.sequence(index))
                if outer > 1:
                    raise cannot_divide_error(
                        f"{key} drops a tensor in which positions share a dimension with samples"
                    )
                self.plan.draws[key] = (index, place)
