"""Defines the operations of one forward as plain data, and completes a forward that is still running.

Autograd has a node per operation. Its metadata has the shape of the result, also of results that nothing
saves. A model of repeated blocks is completed by copies of the last complete block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from paceline.memory.modules import OUTSIDE

_BEFORE = -1


@dataclass(frozen=True)
class Operation:
    """One operation of a forward.

    Attributes:
        name: autograd's, `GeluBackward0`.
        module: to which it belongs.
        num_bytes: of its result.
        inputs: the positions of the operations that made its inputs.
        results: the positions of the operations whose results it saves, its own among them.
        extras: what else it saves, such as masks and statistics: numbers into `Forward.extras`.
        is_view: whether its result shares the memory of its first input.
        is_fp32: whether its result has 32-bit floating-point numbers.
        has_data: whether one of its inputs is of no operation and no parameter, such as a batch.
    """

    name: str
    module: str
    num_bytes: int
    inputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    extras: tuple[int, ...] = ()
    is_view: bool = False
    is_fp32: bool = True
    has_data: bool = False


@dataclass(frozen=True)
class Forward:
    """The operations of a forward in their order.

    Attributes:
        operations: each refers to earlier ones by position.
        extras: bytes of saved tensors that are no operation's result; 0 for the batch.
    """

    operations: tuple[Operation, ...] = ()
    extras: tuple[int, ...] = ()

    @property
    def roots(self) -> list[int]:
        """For each operation, the one whose memory its result has: itself unless it is a view."""
        roots: list[int] = []
        for position, one in enumerate(self.operations):
            roots.append(roots[one.inputs[0]] if one.is_view and one.inputs else position)
        return roots


def to_rows(forward: Forward) -> tuple[list[list[Any]], list[int]]:
    """Return a forward as plain lists, which take less room as text than tables with names."""
    return [list(vars(one).values()) for one in forward.operations], list(forward.extras)


def from_rows(rows: Sequence[Sequence[Any]]) -> Forward:
    """Return the forward in such lists."""
    operations, extras = rows
    plain: list[list[Any]] = [
        [tuple(cell) if isinstance(cell, list) else cell for cell in row] for row in operations
    ]
    return Forward(tuple(Operation(*row) for row in plain), tuple(extras))


def find_blocks(forward: Forward, prefix: str) -> list[tuple[int, int]]:
    """Return the range of each repeated module's operations, first and last position, in their order.

    Args:
        forward: the operations.
        prefix: the modules' common prefix; "" if they are children of the model itself.
    """
    ranges: dict[str, tuple[int, int]] = {}
    for position, one in enumerate(forward.operations):
        if (key := _find_key(one.module, prefix)) is not None:
            ranges[key] = (ranges.get(key, (position, 0))[0], position)
    blocks = sorted(ranges.values())
    overlaps = any(left[1] >= right[0] for left, right in pairwise(blocks))
    return [] if overlaps else blocks


def complete(forward: Forward, prefix: str, number: int) -> Forward | None:
    """Return a forward through all of the repeated modules, made of what has run so far.

    Args:
        forward: what has run.
        prefix: the modules' common prefix.
        number: how many there are.

    Returns:
        None if not even one of them is complete.
    """
    blocks = find_blocks(forward, prefix)
    lengths = [last - first + 1 for first, last in blocks]
    if len(blocks) < 2:
        return forward if number == 1 and blocks else None
    # The last one that was reached may be half through.
    typical = Counter(lengths[:-1]).most_common(1)[0][0]
    done = len(blocks) if lengths[-1] >= typical else len(blocks) - 1
    if done == number:
        return forward
    first, last = blocks[done - 1]
    length = last - first + 1
    operations = list(forward.operations[: last + 1])
    extras = list(forward.extras)
    inside = range(first, last + 1)
    own = _find_own_extras(forward, inside)
    enters = max((i for one in operations[first:] for i in one.inputs if i < first), default=None)
    size = forward.operations[last].num_bytes
    for copy in range(1, number - done + 1):
        shift = copy * length
        renamed = {old: len(extras) + new for new, old in enumerate(own)}
        extras += [forward.extras[old] for old in own]
        for position in inside:
            moved = {i: i + shift for i in inside}
            before = last + shift - length
            if enters is not None:
                moved[enters] = before
            one = forward.operations[position]
            if enters is None and one.has_data:
                # The first module reads the batch; its copy reads the result of the module before.
                data = {extra for extra in one.extras if forward.extras[extra] in (0, size)}
                one = replace(
                    one,
                    inputs=(*one.inputs, _BEFORE),
                    results=(*one.results, *[_BEFORE for _ in data]),
                    extras=tuple(extra for extra in one.extras if extra not in data),
                )
                moved[_BEFORE] = before
            # A name of its own tells the copy from the module that it stands for.
            operations.append(
                replace(
                    _move(one, moved, renamed),
                    module=f"{prefix}.+{copy}" if prefix else f"+{copy}",
                )
            )
    return Forward(tuple(operations), tuple(extras))


def append_heads(forward: Forward, heads: Sequence[float]) -> Forward:
    """Return a forward with matrices that follow its last operation, and with a cross-entropy.

    Args:
        forward: up to there.
        heads: the features that each matrix makes of one.
    """
    operations = list(forward.operations)
    for features in heads:
        last = len(operations) - 1
        size = int(operations[-1].num_bytes * features)
        operations.append(Operation("AddmmBackward0", OUTSIDE, size, (last,), (last,)))
    if heads:
        last = len(operations) - 1
        size = operations[-1].num_bytes
        operations.append(Operation("LogSoftmaxBackward0", OUTSIDE, size, (last,), (last + 1,)))
        operations.append(Operation("NllLossBackward0", OUTSIDE, 4, (last + 1,), (last + 1,)))
    return Forward(tuple(operations), forward.extras)


def _find_key(module: str, prefix: str) -> str | None:
    """Return the part of a module's name that tells repeated modules apart; `None` outside of them."""
    rest = module.removeprefix(f"{prefix}.") if prefix else module
    key = rest.partition(".")[0]
    return key if rest and module != OUTSIDE and (rest != module or not prefix) else None


def _find_own_extras(forward: Forward, inside: range) -> list[int]:
    """Return what only these operations save."""
    shared = {extra for i, one in enumerate(forward.operations) if i not in inside for extra in one.extras}
    return sorted({extra for i in inside for extra in forward.operations[i].extras} - shared)


def _move(one: Operation, moved: Mapping[int, int], renamed: Mapping[int, int]) -> Operation:
    return replace(
        one,
        inputs=_rename(one.inputs, moved),
        results=_rename(one.results, moved),
        extras=_rename(one.extras, renamed),
    )


def _rename(numbers: Sequence[int], names: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(names.get(number, number) for number in numbers)
