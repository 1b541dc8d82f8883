"""Defines the order in which an exact reduction adds: a binary tree over the numbers of the microbatches.

A sum of floating-point numbers depends on the order of its additions. Here the order is that of a tree
which depends on the number of microbatches alone. A subtree of level k covers the microbatches from a
multiple of 2**k to the next one (or to the last microbatch), and its sum is that of its two halves; a
half without microbatches is left out, not added as zero. For 6 microbatches:

    ((0 + 1) + (2 + 3)) + (4 + 5)

A rank computes a block of consecutive microbatches, which consists of a few whole subtrees. It adds within
them; the sums above are added between the ranks. Only siblings in the tree are ever added, so the sum does
not depend on which rank computed what.

A rank's block is one subtree if all ranks have the same number of microbatches and that is a power of two.
Any other block of s microbatches is at most 2 log2(s) + 2 subtrees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from paceline.data.share import list_numbers

Value = TypeVar("Value")
# The microbatches that it covers: the first one, and the one after the last.
Subtree = tuple[int, int]


@lru_cache(maxsize=4096)
def find_sibling(subtree: Subtree, num_leaves: int) -> Subtree | None:
    """Return the other half of the subtree of which this one is a half; `None` for the whole tree."""
    start, stop = subtree
    size = 1
    while start + size < stop:
        size *= 2
    assert start % size == 0, (subtree, num_leaves)
    assert stop == min(start + size, num_leaves), (subtree, num_leaves)
    while size < num_leaves:
        if start // size % 2:
            return start - size, start
        if stop < num_leaves:
            return stop, min(stop + size, num_leaves)
        size *= 2  # its right half has no microbatch
    return None


def join_leaves(leaves: range, num_leaves: int) -> list[Subtree]:
    """Return the largest whole subtrees that some microbatches make up, from left to right.

    Args:
        num_leaves: those of the whole tree.
    """
    tree: TreeSum[None] = TreeSum(num_leaves, lambda left, right: None)
    for leaf in leaves:
        tree.push((leaf, leaf + 1), None)
    return [subtree for subtree, _ in tree.subtrees]


class TreeSum(Generic[Value]):
    """A sum of values in the order of the tree that keeps as few of them as that order allows.

    Values may come in any order: only siblings are added.

    Args:
        num_leaves: microbatches of the whole tree.
        add: from the values of a left and a right subtree to that of both; may reuse either.
    """

    def __init__(self, num_leaves: int, add: Callable[[Value, Value], Value]) -> None:
        self._values: dict[Subtree | None, Value] = {}
        self._num_leaves = num_leaves
        self._add = add

    @property
    def subtrees(self) -> list[tuple[Subtree, Value]]:
        """The values pushed, with siblings added, from left to right."""
        return sorted(
            ((subtree, value) for subtree, value in self._values.items() if subtree is not None),
            key=lambda item: item[0],
        )

    def push(self, subtree: Subtree, value: Value) -> None:
        """Add a subtree, and every sum that this completes."""
        while (sibling := find_sibling(subtree, self._num_leaves)) in self._values:
            assert sibling is not None
            other = self._values.pop(sibling)
            left, right = (other, value) if sibling < subtree else (value, other)
            value = self._add(left, right)
            subtree = min(sibling[0], subtree[0]), max(sibling[1], subtree[1])
        self._values[subtree] = value

    def replace(self, change: Callable[[Value], Value]) -> None:
        """Replace each value that is kept."""
        self._values = {subtree: change(value) for subtree, value in self._values.items()}

    def pick(self, part: Callable[[Value], Value]) -> TreeSum[Value]:
        """Return the sum of a part of each value."""
        picked = TreeSum(self._num_leaves, self._add)
        for subtree, value in self.subtrees:
            picked.push(subtree, part(value))
        return picked


@dataclass(frozen=True)
class ReductionPlan:
    """The reduction of one global batch; the same on every rank.

    Attributes:
        num_leaves: microbatches of the global batch.
        subtrees: per rank, the subtrees that it contributes.
        additions: the additions once these are side by side, rank after rank: pairs of places; the left one
            holds the sum afterwards. The last one, if any, yields the whole sum at place 0.
    """

    num_leaves: int
    subtrees: tuple[tuple[Subtree, ...], ...]
    additions: tuple[tuple[int, int], ...]

    @property
    def num_subtrees(self) -> int:
        """The number of subtrees of all ranks."""
        return sum(map(len, self.subtrees))


@lru_cache(maxsize=64)
def plan_reduction(num_owned: tuple[int, ...], turns: int = 1) -> ReductionPlan:
    """Return the plan that sums the ranks' microbatches.

    Args:
        num_owned: per rank, how many microbatches it computes.
        turns: see `data.share.list_numbers`.
    """
    num_leaves = sum(num_owned)
    own = [list_numbers(num_owned, turns, rank) for rank in range(len(num_owned))]
    subtrees = [tuple(join_leaves(leaves, num_leaves)) for leaves in own]
    additions: list[tuple[int, int]] = []

    # Push places instead of values: the tree then records its additions in their order.
    def add(left: int, right: int) -> int:
        additions.append((left, right))
        return left

    tree = TreeSum(num_leaves, add)
    for place, subtree in enumerate(subtree for each in subtrees for subtree in each):
        tree.push(subtree, place)
    assert [subtree for subtree, _ in tree.subtrees] == ([(0, num_leaves)] if num_leaves else [])
    return ReductionPlan(num_leaves, tuple(subtrees), tuple(additions))


@dataclass(frozen=True)
class OwnBlocks:
    """The blocks of a global batch to which a rank's microbatches belong; each has a sum of its own.

    Attributes:
        leaves: the microbatches of each, also those of other ranks.
        plan: the sum of the only block over the ranks; `None` for slots, of which each is one rank's.
    """

    leaves: tuple[range, ...] = ()
    plan: ReductionPlan | None = None

    @classmethod
    def whole(cls, num_owned: tuple[int, ...], turns: int = 1) -> OwnBlocks:
        """Return the global batch as one block."""
        return cls((range(sum(num_owned)),), plan_reduction(num_owned, turns))
