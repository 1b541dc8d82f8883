"""Simulates the memory of one forward and backward from its operations, as it is and under other settings.

A forward holds what autograd saves and the results that are still to be used. A backward releases what each
operation saved, and holds the gradients of results whose operations are still to come. The highest point is
often shortly after the backward begins: all activations are there, and the first gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from paceline.memory.heap import LARGEST_IN_HEAP, Heap
from paceline.memory.operations import Forward, Operation

# Their gradient is the one that comes in, or a view of it.
_PASSES_GRADIENT = {"AddBackward0", "SubBackward0", "CatBackward0", "SumBackward1", "SumBackward0"}
# A view's gradient is a view, except where the forward repeats or picks elements, or changes the type.
_NEW_GRADIENT = {
    *("ExpandBackward0", "SelectBackward0", "SliceBackward0", "SplitBackward0", "ToCopyBackward0"),
    *("SplitWithSizesBackward0", "UnbindBackward0"),
}
# The first step raises the heap's threshold, so a later one may be higher.
_ROUNDS = 2
# Small objects between blocks of the heap keep free ones apart, which the model of the heap does not have.
# Measured: up to three quarters of the heap's blocks (benchmarks/memory).
_LIKELY, _MOST = 0.25, 0.75
_CAST = "ToCopyBackward0"
# Operations for which autocast casts their inputs to 16 bits, by the beginnings of their names.
_LOWERED = (
    *("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution"),
    *("Linear", "MkldnnLinear", "Mv", "ScaledDotProduct"),
)
# Those for which it casts them to 32 bits: everywhere, and besides on a GPU.
_RAISED = ("MseLoss", "NllLoss", "BinaryCrossEntropy", "SmoothL1Loss", "HuberLoss", "L1Loss")
_RAISED_ON_DEVICE = (
    *("NativeLayerNorm", "Softmax", "LogSoftmax", "Pow", "Exp", "Log", "Sum"),
    *("Prod", "Norm", "LinalgVectorNorm", "Cumsum", "Softplus", "Rsqrt", "Reciprocal"),
)


@dataclass(frozen=True)
class Peak:
    """The most that a forward and backward hold at once besides model state and batch, in bytes.

    Attributes:
        num_bytes: of tensors.
        pieces: freed memory that the C library keeps meanwhile, as estimated.
        most_pieces: the upper end of that estimate. The lower end is none.
    """

    num_bytes: int = 0
    pieces: int = 0
    most_pieces: int = 0


def simulate(
    forward: Forward,
    blocks: Sequence[tuple[int, int]] = (),
    *,
    has_graph: bool = True,
    has_backward: bool = True,
    keeps_pieces: bool = False,
) -> Peak:
    """Return the peak of a forward and a backward.

    Args:
        forward: all operations.
        blocks: what is computed again in backward: first and last position of each part.
        has_graph: whether autograd saves anything.
        has_backward: whether a backward follows; not without a graph.
        keeps_pieces: whether memory is from the heap of the C library.
    """
    if not forward.operations:
        return Peak()
    heap = Heap() if keeps_pieces else None
    for _ in range(_ROUNDS):
        held = _Held(heap)
        _Simulation(forward, blocks).run(held, has_graph=has_graph, has_backward=has_backward)
        held.drop_all()
    pieces = 0 if heap is None else max(0, heap.peak - held.peak)
    return Peak(held.peak, pieces + int(held.small * _LIKELY), pieces + int(held.small * _MOST))


def measure_saved(forward: Forward) -> int:
    """Return the bytes that a backward needs of the forward."""
    return _Simulation(forward).measure_saved()


def scale(forward: Forward, share: float) -> Forward:
    """Return the forward of a part of the samples."""
    return Forward(
        tuple(
            one if _is_weight(one) else replace(one, num_bytes=int(one.num_bytes * share))
            for one in forward.operations
        ),
        tuple(int(size * share) for size in forward.extras),
    )


def lower(forward: Forward, *, is_device: bool) -> Forward:
    """Return the forward as autocast with bfloat16 would run it, its casts included."""
    raised = (*_RAISED, *_RAISED_ON_DEVICE) if is_device else _RAISED
    operations: list[Operation] = []
    extras = list(forward.extras)
    # The new position of each operation, and that of the cast of its result.
    moved: list[int] = []
    casts: dict[tuple[int, bool], int] = {}

    def cast(old: int, is_fp32: bool) -> int:
        position = moved[old]
        if operations[position].is_fp32 == is_fp32:
            return position
        if (position, is_fp32) not in casts:
            made = operations[position]
            size = made.num_bytes * 2 if is_fp32 else made.num_bytes // 2
            casts[position, is_fp32] = len(operations)
            operations.append(Operation(_CAST, made.module, size, (position,), is_fp32=is_fp32))
        return casts[position, is_fp32]

    for position, one in enumerate(forward.operations):
        weights: list[int] = []
        is_lowered = one.is_fp32 and one.name.startswith(_LOWERED)
        if is_lowered or one.name.startswith(raised):
            inputs = {old: cast(old, not is_lowered) for old in one.inputs}
            is_half = is_lowered
            weights = [
                new for old, new in inputs.items() if is_lowered and _is_weight(forward.operations[old])
            ]
        else:
            inputs = {old: moved[old] for old in one.inputs}
            # Data is taken to have 32 bits, and so is the result of an operation on both.
            is_half = not one.has_data and bool(inputs)
            is_half = is_half and not any(operations[new].is_fp32 for new in inputs.values())
        is_half = is_half and one.is_fp32
        inputs[position] = len(operations)
        moved.append(len(operations))
        operations.append(
            replace(
                one,
                num_bytes=one.num_bytes // 2 if is_half else one.num_bytes,
                inputs=tuple(inputs[old] for old in one.inputs),
                # A weight's cast is saved in place of the weight, which is no result of an operation.
                results=(*(inputs.get(old, moved[old]) for old in one.results), *weights),
                is_fp32=one.is_fp32 and not is_half,
            )
        )
    return Forward(tuple(operations), tuple(extras))


def _is_weight(one: Operation) -> bool:
    """Return whether an operation is a view of a parameter."""
    return one.is_view and not one.inputs


class _Held:
    """Bytes that are held now, and the most so far.

    Args:
        heap: from which they are; `None`: pieces do not count.

    Attributes:
        peak: the most so far.
        small: bytes in blocks of the heap at that point.
    """

    def __init__(self, heap: Heap | None) -> None:
        self.peak = self.small = 0
        self._heap = heap
        self._now = self._small = 0
        self._sizes: dict[Hashable, int] = {}

    def take(self, name: Hashable, size: int) -> None:
        """Hold a tensor, unless it is held already."""
        if name in self._sizes:
            return
        self._sizes[name] = size
        self._now += size
        self._small += self._count_small(size)
        if self._now > self.peak:
            self.peak, self.small = self._now, self._small
        if size and self._heap is not None:
            self._heap.allocate(name, size)

    def drop(self, name: Hashable) -> None:
        """Hold a tensor no longer, if it is held."""
        size = self._sizes.pop(name, 0)
        self._now -= size
        self._small -= self._count_small(size)
        if size and self._heap is not None:
            self._heap.free(name)

    def drop_all(self) -> None:
        """Hold nothing."""
        for name in list(self._sizes):
            self.drop(name)

    def _count_small(self, size: int) -> int:
        return size if self._heap is not None and size < LARGEST_IN_HEAP else 0


class _Simulation:
    """One forward and backward.

    Args:
        forward: the operations.
        blocks: what is computed again in backward: first and last position of each part.
    """

    def __init__(self, forward: Forward, blocks: Sequence[tuple[int, int]] = ()) -> None:
        self._operations = forward.operations
        self._roots = forward.roots
        self._extras = forward.extras
        self._blocks = blocks
        self._block_of = {i: number for number, (a, b) in enumerate(blocks) for i in range(a, b + 1)}
        self._last_use = list(range(len(self._operations)))
        for position, one in enumerate(self._operations):
            for i in one.inputs:
                self._last_use[self._roots[i]] = position
        # What each operation saves: results as (position, ""), the rest as (number, "extra").
        self._saved = [
            {(self._roots[i], "") for i in one.results} | {(extra, "extra") for extra in one.extras}
            for one in self._operations
        ]
        self._enters = [self._find_entering(first, last) for first, last in blocks]

    def measure_saved(self) -> int:
        """Return what the backward needs of the forward."""
        return sum(self._size(what) for what in {what for saved in self._saved for what in saved})

    def run(self, held: _Held, *, has_graph: bool, has_backward: bool) -> None:
        """Take and drop tensors in the order of a forward and, if it has one, a backward."""
        everything = range(len(self._operations))
        self._run_forward(held, everything, saves=has_graph)
        if not (has_graph and has_backward):
            return
        # How many operations, and parts that run again, still need a saved tensor.
        needs: Counter[tuple[int, str]] = Counter()
        for position in everything:
            needs.update(self._saved[position])
        for entering in self._enters:
            needs.update(entering)
        self._run_backward(held, needs)

    def _find_entering(self, first: int, last: int) -> set[tuple[int, str]]:
        """Return what a part gets from before it, and keeps to run again."""
        return {
            (self._roots[i], "")
            for one in self._operations[first : last + 1]
            for i in one.inputs
            if self._roots[i] < first
        }

    def _size(self, what: tuple[int, str]) -> int:
        number, kind = what
        if kind:
            return self._extras[number]
        # A view without inputs is of a parameter.
        one = self._operations[number]
        return 0 if one.is_view else one.num_bytes

    def _run_forward(self, held: _Held, positions: range, *, saves: bool) -> None:
        """Run operations in order; drop each result after its last use unless it is saved."""
        kept = {what for entering in self._enters for what in entering}
        dropped: dict[int, list[int]] = {}
        for position, last in enumerate(self._last_use):
            if self._roots[position] == position:
                dropped.setdefault(last, []).append(position)
        if saves:
            kept |= {what for i in positions if i not in self._block_of for what in self._saved[i]}
        end = positions[-1]
        for position in positions:
            root = self._roots[position]
            held.take((root, ""), self._size((root, "")))
            own = [what for what in self._saved[position] if what[1]]
            for what in own:
                held.take(what, self._size(what))
            for what in own:
                if what not in kept:
                    held.drop(what)
            for old in dropped.get(position, ()):
                if (old, "") not in kept and old != self._roots[end]:
                    held.drop((old, ""))

    def _run_backward(self, held: _Held, needs: Counter[tuple[int, str]]) -> None:
        # The gradient of each operation's result: the number of its memory, which several may share.
        gradients: dict[int, int] = {}
        users: Counter[int] = Counter()
        count = len(self._operations)
        end = count - 1
        gradients[end] = end
        users[end] += 1
        # What follows the last operation has run, and has given its result a gradient.
        result = (self._roots[end], "")
        if not needs[result]:
            held.drop(result)
        held.take((end, "gradient"), self._operations[end].num_bytes)
        for position in range(end, -1, -1):
            self._begin_block(held, position)
            one = self._operations[position]
            incoming = gradients.pop(position, None)
            if incoming is not None:
                for i in one.inputs:
                    count += 1
                    made = self._find_gradient(one, i, incoming) if users[incoming] else None
                    number = count if made is None else made
                    held.take((number, "gradient"), self._operations[i].num_bytes)
                    if i not in gradients:
                        gradients[i] = number
                        users[number] += 1
                    elif users[gradients[i]] == 1:  # The sum is made in place.
                        held.drop((number, "gradient") if made is None else None)
                    else:
                        users[gradients[i]] -= 1
                        gradients[i] = number
                        users[number] += 1
            for what in self._saved[position]:
                needs[what] -= 1
                if not needs[what]:
                    held.drop(what)
            self._end_block(held, position, needs)
            if incoming is not None:
                users[incoming] -= 1
                if not users[incoming]:
                    held.drop((incoming, "gradient"))

    def _find_gradient(self, one: Operation, i: int, incoming: int) -> int | None:
        """Return the memory of an input's gradient if it is that of the incoming one."""
        passes = one.name in _PASSES_GRADIENT or (one.is_view and one.name not in _NEW_GRADIENT)
        made = self._operations[i]
        is_same = made.num_bytes <= one.num_bytes or one.name.startswith("Sum")
        return incoming if passes and is_same and made.is_fp32 == one.is_fp32 else None

    def _begin_block(self, held: _Held, position: int) -> None:
        """Run a part again if its backward begins."""
        number = self._block_of.get(position)
        if number is None or position != self._blocks[number][1]:
            return
        first, last = self._blocks[number]
        for i in range(first, last + 1):
            for what in self._saved[i]:
                held.take(what, self._size(what))

    def _end_block(self, held: _Held, position: int, needs: Counter[tuple[int, str]]) -> None:
        number = self._block_of.get(position)
        if number is not None and position == self._blocks[number][0]:
            for what in self._enters[number]:
                needs[what] -= 1
                if not needs[what]:
                    held.drop(what)
