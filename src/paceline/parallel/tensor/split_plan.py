"""Decides which dimensions are split over tp, and where ranks communicate.

From a trace (`trace.py`) and the classes of its dimensions (`rules.py`), atoms are chosen to be cut: first
those that cut most bytes of matrices. Every tensor is then one of three:

- cut: it has a chosen atom, and each rank holds its part;
- whole: it has none, and every rank computes the same;
- a sum: a product over a chosen atom; each rank holds an addend of it. It is summed where it arises (an
  exit).

Where a whole activation meets cut tensors (an entry), each rank gets only a part of its gradient, so backward
sums the gradients there. These are Megatron-LM's f and g (Shoeybi et al. 2019, section 3): one all-reduce per
attention or feed-forward and pass. A whole parameter that meets cut tensors inside (a norm of queries) has
its gradient summed once per step instead (`SplitPlan.partial`).

A choice is made only if a hook can reach entry and exit: the input or output of a module, or a linear layer.
Then the forward runs once more with the parts of a rank, and every shape is compared with the expected
one. Tensors that do not fit stay whole, and the plan records the reason.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.parallel.blocks import find_blocks
from paceline.parallel.dropout.replacements import Masks
from paceline.parallel.split import Split
from paceline.parallel.tensor.atoms import Atom, leaves
from paceline.parallel.tensor.backward import BackwardCheck
from paceline.parallel.tensor.calls import CallSite, Site
from paceline.parallel.tensor.flow import CutBoundary, Exit, Flow, UnreachableError, Uses
from paceline.parallel.tensor.rules import Dims, atoms_of, read_dims
from paceline.parallel.tensor.sequence import (
    DIM,
    Sequence,
    collapse,
    mismatch_error,
    plan_sequence,
    rehearse,
)
from paceline.parallel.tensor.sizes import SIZED, change_size
from paceline.parallel.tensor.trace import Detour, Trace, TracedOp, trace_forward


@dataclass
class SplitPlan:
    """The way in which one model is split.

    Attributes:
        num_ranks: degree of tp.
        splits: by full name, how a parameter or buffer is cut (tied ones under every name).
        entries: places where backward sums the gradients of whole activations.
        exits: places where sums over ranks arise.
        sizes: by module, the calls in its forward that are given a whole tensor's size, each with that
            dimension of its result (`sizes.py`).
        sites: by module, the places in the source where its forward makes changed calls, each with the number
            of calls that the trial made there.
        partial: names of whole parameters that get a part of their gradient on each rank.
        outputs: by number among the tensors of the result, how it is cut.
        draws: by key of each call of a dropout (`dropout/masks.py`), how the dropped tensor is cut; `None` if
            all ranks have the whole tensor.
        sequence: how activations are cut along the sequence, if requested.
        split_bytes: bytes of the cut matrices that are operands of products.
        matmul_bytes: bytes of all matrices that are operands of products.
        whole: matrices that stay whole, with the reason.
    """

    num_ranks: int
    splits: dict[str, Split] = field(default_factory=dict)
    entries: list[CutBoundary] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    sizes: dict[str, dict[CallSite, int]] = field(default_factory=dict)
    sites: dict[str, dict[Site, int]] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    outputs: dict[int, Split] = field(default_factory=dict)
    draws: dict[str, Split | None] = field(default_factory=dict)
    sequence: Sequence | None = None
    split_bytes: int = 0
    matmul_bytes: int = 0
    whole: dict[str, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of the matrices' bytes that is cut, from 0 to 1."""
        return self.split_bytes / self.matmul_bytes if self.matmul_bytes else 0.0

    def describe(self) -> str:
        """Return the plan as text: one line per kind of module, then the matrices that stay whole."""
        lines = [
            f"tp={self.num_ranks}: {self.share:.1%} of {self.matmul_bytes:,} bytes of matrices are split"
        ]
        grouped: dict[tuple[str, str], int] = defaultdict(int)
        for name, split in self.splits.items():
            packed = f", {split.outer} packed" if split.outer > 1 else ""
            grouped[(collapse(name), f"dimension {split.dim}{packed}")] += 1
        for (name, how), count in grouped.items():
            lines.append(f"  {name} ({count}): {how}" if count > 1 else f"  {name}: {how}")
        reasons: dict[tuple[str, str], int] = defaultdict(int)
        for name, reason in self.whole.items():
            reasons[(collapse(name), reason)] += 1
        along = self.sequence or Sequence()
        for stretch in along.stretches:
            lines.append(f"  split along the sequence: from {stretch.first} to {stretch.last}")
        for name in dict.fromkeys(collapse(taken.module) for taken in along.whole):
            lines.append(f"  whole sequence on every rank: {name}")
        own: dict[str, int] = defaultdict(int)
        for name in dict.fromkeys(leaving.module for leaving in self.exits if leaving.spot is not None):
            own[collapse(name) or "the model"] += 1
        for name, count in own.items():
            lines.append(f"  summed inside its own forward: {name}{f' ({count})' if count > 1 else ''}")
        for (name, reason), count in reasons.items():
            lines.append(f"  whole on every rank: {name}{f' ({count})' if count > 1 else ''}: {reason}")
        return "\n".join(lines)


def find_plan(
    model: nn.Module,
    example: Callable[[nn.Module], Any] | None,
    num_ranks: int,
    masks: Masks | None = None,
    *,
    sequence: bool = False,
) -> SplitPlan:
    """Find out how a model can be split over `num_ranks`, without changing it.

    Args:
        model: in training mode, whole; may be on meta.
        example: calls the model on a batch of a few samples.
        num_ranks: degree of tp.
        masks: the model's dropout, so that the plan knows which dropouts see parts.
        sequence: whether to cut activations between the blocks along the sequence.
    """
    if example is None:
        raise PacelineError(
            "PL463",
            saw=f"tp={num_ranks} without an example batch.",
            rule="To find how tp can split a model, one forward is traced.",
            fix="Pass example=batch: tensors as the training loop provides them, with a few samples.",
        )
    trace = trace_forward(model, example, masks=masks)
    planner = _Planner(model, example, num_ranks, trace, read_dims(trace), masks)
    while True:
        planner.choose()
        mismatch = planner.check()
        if mismatch is None:
            break
        planner.give_up(*mismatch)
    plan = planner.build()
    if not plan.splits:
        reasons = "; ".join(dict.fromkeys(f"{collapse(n)}: {why}" for n, why in plan.whole.items()))
        raise PacelineError(
            "PL461",
            saw=f"tp={num_ranks} for {type(model).__name__}, in which nothing can be split. {reasons[:600]}",
            rule="Ranks of tp divide the work of matrix products; if none is split, all ranks compute the "
            "same.",
            fix="Use these ranks for dp_replicate or dp_shard, or choose a tp that divides the heads.",
        )
    if sequence:
        plan.sequence = planner.plan_sequence()
        plan.partial |= plan.sequence.partial
    return plan


class _Planner:
    def __init__(
        self,
        model: nn.Module,
        run: Callable[[nn.Module], Any],
        num_ranks: int,
        trace: Trace,
        dims: Dims,
        masks: Masks | None,
    ) -> None:
        self.model, self.run, self.num_ranks = model, run, num_ranks
        self.trace, self.dims, self.masks = trace, dims, masks
        self.modules = dict(model.named_modules())
        self.chosen: list[Atom] = []
        self._sizes: dict[str, dict[CallSite, int]] = {}
        self._flow: Flow | None = None
        self._uses = Uses(trace)
        # The atoms are final from here on: no further rule is applied.
        self.atoms = {number: atoms_of(dims, number) for number in trace.shapes}
        for number, how in trace.leaving.items():
            for _, _, atom in self.atoms[number]:
                atom.pin(f"it leaves the model whole: {how}")
        self._produced = trace.list_produced()
        self.holders: dict[Atom, set[int]] = defaultdict(set)
        for number, found in self.atoms.items():
            for _, _, atom in found:
                self.holders[atom].add(number)
        self.products = {op: leaves(dim) for op, dim in dims.products.items()}
        self.lookups = {op: leaves(dim) for op, dim in dims.lookups.items()}

    def choose(self) -> None:
        """Choose atoms, those that cut most bytes of matrices first, as long as hooks can reach."""
        self.chosen = []
        worth: dict[Atom, int] = defaultdict(int)
        for number, cost in self.matrices().items():
            for _, _, atom in self.atoms[number]:
                worth[atom] += cost
        # One by one: whether a hook can reach an atom's entries and exits depends on those chosen before.
        for atom in sorted(worth, key=lambda atom: -worth[atom]):
            if self.can_cut(atom):
                self._try(atom)
        vocabulary = {atom.size for atom in self.chosen if self.holders[atom] & set(self.trace.outputs)}
        for found in self.lookups.values():
            for atom in found:
                # A separate table is worth a collective if it is as tall as the vocabulary.
                if len(found) == 1 and atom.size in vocabulary and self.can_cut(atom):
                    self._try(atom)
        self._flow = self._read_flow(self.chosen)

    def matrices(self) -> dict[int, int]:
        """Return the bytes of the parameters that are operands of products, by their number."""
        roots = _trace_roots(self.trace)
        found: dict[int, int] = {}
        for op in self.products:
            for operand in self.trace.ops[op].inputs[-2:]:
                root = roots.get(operand)
                if root is not None:
                    itemsize = torch.empty((), dtype=self.trace.dtypes[root]).element_size()
                    found[root] = math.prod(self.trace.shapes[root]) * itemsize
        return found

    def can_cut(self, atom: Atom) -> bool:
        if atom.pinned or atom in self.chosen:
            return False
        if atom.size % self.num_ranks:
            atom.pin(f"its size of {atom.size} is not divisible by {self.num_ranks}")
            return False
        for number in self.holders[atom]:
            if sum(other is atom for _, _, other in self.atoms[number]) > 1:
                atom.pin("two dimensions of one tensor would be split")
                return False
            if number not in self.trace.names and number not in self._produced:
                atom.pin("a tensor of the batch has this dimension")
                return False
        # A tensor is cut along one dimension only.
        return not any(self.holders[atom] & self.holders[other] for other in self.chosen)

    def _try(self, atom: Atom) -> None:
        try:
            self._read_flow([*self.chosen, atom])
        except UnreachableError as error:
            atom.pin(str(error))
            return
        self.chosen.append(atom)

    def _read_flow(self, chosen: list[Atom]) -> Flow:
        cut = {number for atom in chosen for number in self.holders[atom]}
        sums = {op for op, found in self.products.items() if any(atom in chosen for atom in found)}
        lookups = {op for op, found in self.lookups.items() if any(atom in chosen for atom in found)}
        return Flow(self._uses, self.modules, cut, sums, lookups)

    def splits(self) -> dict[int, Split]:
        """Return by number of a tensor how it is cut."""
        found = {}
        for atom in self.chosen:
            for number in self.holders[atom]:
                place, outer = next((p, o) for p, o, other in self.atoms[number] if other is atom)
                found[number] = Split(place, outer, self.num_ranks)
        return found

    def check(self) -> tuple[int, str] | None:
        """Run the parts of a rank; return the first operation that differs from the expected one, and why."""
        return self._first_mismatch() if self.chosen else None

    def give_up(self, op: int, reason: str) -> None:
        """Leave whole the tensors that an operation cannot process in parts."""
        # The difference may show some operations after the cut that causes it, so the nearest cut tensors
        # before it are given up.
        around = range(op, max(-1, op - 40), -1)
        for at in around:
            tensors = {*self.trace.ops[at].inputs, *self.trace.ops[at].outputs}
            found = [atom for atom in self.chosen if self.holders[atom] & tensors]
            for atom in found:
                atom.pin(reason)
            if found:
                return
        for atom in self.chosen:
            atom.pin(reason)

    def _first_mismatch(self, sequence: Sequence | None = None) -> tuple[int, str] | None:
        splits = self.splits()
        by_name = {name: splits[number] for number, name in self.trace.names.items() if number in splits}

        def reshape(name: str, tensor: Tensor) -> tuple[int, ...]:
            shape = list(tensor.shape)
            split = by_name.get(name)
            if split is not None:
                shape[split.dim] //= self.num_ranks
            return tuple(shape)

        self._sizes = {}
        kept: dict[tuple[str, CallSite], int] = {}

        def resize(number: int, func: Any, args: Any, kwargs: Any) -> Any:
            call = self.trace.written[number] if number < len(self.trace.written) else None
            if call is None or call.func is not func or func not in SIZED:
                return args, kwargs
            kept[(call.module, call.spot)] = call.first
            cut = [n for n in call.outputs if n in splits]
            if not cut:
                return args, kwargs
            dim = splits[cut[0]].dim
            size = self.trace.shapes[cut[0]][dim]

            def change(given: int) -> int:
                if given != size:  # already the part's size
                    return given
                self._sizes.setdefault(call.module, {})[call.spot] = dim
                kept.pop((call.module, call.spot), None)
                return given // self.num_ranks

            return change_size(func, args, kwargs, dim, change)

        parts = trace_forward(
            self.model,
            self.run,
            reshape,
            partial_result=True,
            resize=resize,
            masks=self.masks,
            detours=rehearse(sequence, self.num_ranks) if sequence else self._rehearse_entries(),
            finds_kept=bool(self.trace.leaving),
        )
        # One call site can be changed in all of its calls or in none.
        for (module, spot), at in kept.items():
            if spot in self._sizes.get(module, {}):
                return at, f"{module or 'the model'} is also called with tensors that are not split"
        made: set[int] = set()  # created from sizes alone, such as the mask of a dropout
        # Both traces must have the same operations, and every shape must be the planned part of the whole.
        pairs = itertools.zip_longest(_compared(self.trace), _compared(parts))
        last = max(at for at, _ in _compared(self.trace))
        same: list[tuple[int, int]] = []
        for one, other in pairs:
            at, mine = one or (last, self.trace.ops[last])
            where = mine.module or "the model"
            if one is None or other is None or _kind(mine) != _kind(other[1]):
                return at, f"the code of {where} takes another path when its tensors are split"
            its = other[1]
            same.append((at, other[0]))
            if sequence is not None and made.issuperset(mine.inputs):
                made.update(mine.outputs)
                continue
            for whole, part in zip(mine.outputs, its.outputs, strict=True):
                expected = list(self.trace.shapes[whole])
                if whole in splits:
                    expected[splits[whole].dim] //= self.num_ranks
                if sequence is not None and (at, whole) in sequence.stream:
                    # [batch, length, ...], or both in one dimension
                    expected[min(DIM, len(expected) - 1) if len(expected) > 2 else 0] //= self.num_ranks
                if tuple(expected) != parts.shapes[part]:
                    return at, f"the code of {where} uses a fixed size ({mine.name})"
        assert self._flow is not None
        return None if sequence else BackwardCheck(self._flow, self.trace, parts, same).find_wrong()

    def _rehearse_entries(self) -> list[Detour]:
        """Return detours that replace a tensor where an entry of the plan will."""
        assert self._flow is not None
        return [
            Detour(entry.module, entry.keys, lambda tensor: tensor.view_as(tensor), number=entry.number)
            for entry in self._flow.entries
        ]

    def build(self) -> SplitPlan:
        splits = self.splits()
        assert self._flow is not None
        flow = self._flow
        plan = SplitPlan(self.num_ranks, entries=flow.entries, exits=flow.exits, partial=flow.partial)
        plan.sizes = self._sizes
        changed = {(name, spot.site) for name, sizes in plan.sizes.items() for spot in sizes}
        changed |= {(leaving.module, leaving.spot.site) for leaving in plan.exits if leaving.spot is not None}
        for call in self.trace.written:
            if (call.module, call.spot.site) in changed:
                sites = plan.sites.setdefault(call.module, {})
                sites[call.spot.site] = max(sites.get(call.spot.site, 0), call.spot.number + 1)
        # The trace knows a tied tensor by its first name; its split belongs to every name.
        first = {name: number for number, name in self.trace.names.items()}
        canonical: dict[int, str] = {}
        for name, tensor in _named_tensors(self.model):
            canonical.setdefault(id(tensor), name)
            number = first.get(canonical[id(tensor)])
            if number is not None and number in splits:
                plan.splits[name] = splits[number]
        for place, number in enumerate(self.trace.outputs):
            if number in splits:
                plan.outputs[place] = splits[number]
        plan.draws = {key: splits.get(number) for key, number in self.trace.drawn.items()}
        for number, cost in self.matrices().items():
            plan.matmul_bytes += cost
            if number in splits:
                plan.split_bytes += cost
            else:
                plan.whole[self.trace.names[number]] = self._reason(number)
        return plan

    def plan_sequence(self) -> Sequence:
        assert self._flow is not None
        blocks = [name for name, _ in find_blocks(self.model) if name]
        failed: dict[int, str] = {}
        while True:
            plan = plan_sequence(self.trace, self._flow, self.modules, blocks, self.num_ranks, failed)
            mismatch = self._first_mismatch(plan)
            if mismatch is None:
                return plan
            if mismatch[0] in failed:
                raise mismatch_error(mismatch[1])
            failed[mismatch[0]] = mismatch[1]

    def _reason(self, number: int) -> str:
        reasons = [atom.pinned for _, _, atom in self.atoms[number] if atom.pinned]
        return "; ".join(dict.fromkeys(reasons)) or "another dimension of the same tensors is split"


def _compared(trace: Trace) -> Iterator[tuple[int, TracedOp]]:
    """Yield the operations that parts must go through as the whole does.

    Copies and expansions to the same shape are left out: they depend on the order of elements in memory,
    which may be another one for parts.
    """
    for number, op in enumerate(trace.ops):
        if op.is_outside:
            continue
        same = bool(op.inputs) and trace.shapes[op.inputs[0]] == trace.shapes[op.outputs[0]]
        if not (same and op.name in ("clone", "contiguous", "expand", "view", "_unsafe_view")):
            yield number, op


def _kind(op: TracedOp) -> str:
    return "view" if op.name in ("_unsafe_view", "_reshape_alias", "reshape") else op.name


def _trace_roots(trace: Trace) -> dict[int, int]:
    """Return, by number of a tensor that is a view or cast of a parameter, that parameter."""
    roots = {number: number for number in trace.names}
    for op in trace.ops:
        if op.name in ("t", "transpose", "view", "_unsafe_view", "expand", "_to_copy", "permute", "clone"):
            root = roots.get(op.inputs[0]) if op.inputs else None
            if root is not None:
                for output in op.outputs:
                    roots.setdefault(output, root)
    return roots


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
