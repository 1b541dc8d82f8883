"""The order in which an exact reduction adds: one binary tree over the numbers of the microbatches.

A sum of floating-point numbers depends on the order of its additions. Here the order is that of a tree
which depends on the number of microbatches alone: a node of level k covers the microbatches from a
multiple of 2**k to the next one (or to the last microbatch), and is the sum of its two halves; a half
without microbatches is left out, not added as zero. For 6 microbatches:

    ((0 + 1) + (2 + 3)) + (4 + 5)

A rank computes a block of consecutive microbatches, which is the union of a few whole nodes. It adds
inside of them; what is above them is added from the ranks' nodes. Nobody adds across two nodes that are
not siblings, so who computed what can't be seen in the sum.

A rank whose share is a power of two, on ranks that share evenly, holds one node. Any other block of s
microbatches is at most 2 log2(s) nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

Value = TypeVar("Value")
# The microbatches that a node covers: the first one, and the one after the last.
Node = tuple[int, int]


def are_siblings(left: Node, right: Node, num_leaves: int) -> bool:
    """Whether two nodes, the left one's end being the right one's start, are the halves of a node.

    Args:
        left, right: nodes of the tree.
        num_leaves: microbatches of the whole tree.
    """
    assert left[1] == right[0], (left, right)
    start, middle, stop = left[0], left[1], right[1]
    half = 1 << ((stop - start - 1).bit_length() - 1)
    return start % (2 * half) == 0 and middle == start + half and stop == min(start + 2 * half, num_leaves)


def split_block(start: int, stop: int, num_leaves: int) -> list[Node]:
    """The largest whole nodes that make up a block of microbatches, from left to right.

    Args:
        start, stop: the block; empty where they are equal.
        num_leaves: microbatches of the whole tree.
    """
    assert 0 <= start <= stop <= num_leaves, (start, stop, num_leaves)
    tree: TreeSum[None] = TreeSum(num_leaves, lambda left, right: None)
    for leaf in range(start, stop):
        tree.push((leaf, leaf + 1), None)
    return [node for node, _ in tree.nodes]


class TreeSum(Generic[Value]):
    """Adds values in the order of the tree, keeping as few of them as that order allows.

    Args:
        num_leaves: microbatches of the whole tree.
        add: from the values of a left and a right node to that of both; may reuse either.

    Attributes:
        nodes: what has been pushed, with siblings added, from left to right.
    """

    def __init__(
        self,
        num_leaves: int,
        add: Callable[[Value, Value], Value],
        nodes: Sequence[tuple[Node, Value]] = (),
    ) -> None:
        self.nodes = list(nodes)
        self._num_leaves = num_leaves
        self._add = add

    def push(self, node: Node, value: Value) -> None:
        """Adds a node to the right of all that were pushed before, and whatever this completes."""
        while self.nodes and are_siblings(self.nodes[-1][0], node, self._num_leaves):
            (start, _), left = self.nodes.pop()
            node, value = (start, node[1]), self._add(left, value)
        self.nodes.append((node, value))


@dataclass(frozen=True)
class Plan:
    """How one global batch is reduced; the same on every rank.

    Attributes:
        num_leaves: microbatches of the global batch.
        nodes: per rank, the nodes that it brings along.
        additions: what is added once these lie side by side, rank after rank: pairs of places, of which
            the left one holds the sum afterwards. The last one, if any, gives the whole sum at place 0.
    """

    num_leaves: int
    nodes: tuple[tuple[Node, ...], ...]
    additions: tuple[tuple[int, int], ...]

    @property
    def num_nodes(self) -> int:
        """Nodes of all ranks."""
        return sum(map(len, self.nodes))


@lru_cache(maxsize=64)
def plan_reduction(num_owned: tuple[int, ...]) -> Plan:
    """How blocks of microbatches, numbered through from the first rank to the last, become one sum.

    Args:
        num_owned: per rank, how many microbatches it computes.
    """
    num_leaves = sum(num_owned)
    nodes: list[tuple[Node, ...]] = []
    start = 0
    for count in num_owned:
        nodes.append(tuple(split_block(start, start + count, num_leaves)))
        start += count
    additions: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        additions.append((left, right))
        return left

    tree = TreeSum(num_leaves, add)
    for place, node in enumerate(node for own in nodes for node in own):
        tree.push(node, place)
    assert [node for node, _ in tree.nodes] == ([(0, num_leaves)] if num_leaves else [])
    return Plan(num_leaves, tuple(nodes), tuple(additions))
