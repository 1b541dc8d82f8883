"""Splits the additions of a reduction between the nodes: first those inside a node, then those between nodes.

The order of additions stays that of the tree. An addition belongs inside a node if the node's own ranks
contribute both operands. A node whose ranks own consecutive microbatches is left with a few sums, most often
one. A node whose ranks own every other microbatch is left with one sum per subtree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.comm.tree import ReductionPlan

Additions = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class NodePlan:
    """The additions of a plan by node. Places number the subtrees of all ranks, as in `ReductionPlan`.

    Attributes:
        within: by node, the additions of places that its ranks contribute.
        kept: by node, the places that hold its sums after these.
        between: the additions after these; the last one, if any, yields the whole sum.
    """

    within: tuple[Additions, ...]
    kept: tuple[tuple[int, ...], ...]
    between: Additions


def split_by_node(plan: ReductionPlan, nodes: Sequence[int]) -> NodePlan:
    """Return the additions of a plan by node.

    Args:
        plan: the reduction.
        nodes: each rank's node, numbered from 0.
    """
    num_nodes = max(nodes) + 1
    # The node that can still add to a place; `None` once another node's sum is in it.
    holders: list[int | None] = [
        node for node, subtrees in zip(nodes, plan.subtrees, strict=True) for _ in subtrees
    ]
    kept = [[place for place, holder in enumerate(holders) if holder == node] for node in range(num_nodes)]
    within: list[list[tuple[int, int]]] = [[] for _ in range(num_nodes)]
    between: list[tuple[int, int]] = []
    for left, right in plan.additions:
        holder = holders[left]
        if holder is not None and holder == holders[right]:
            within[holder].append((left, right))
            kept[holder].remove(right)
        else:
            between.append((left, right))
            holders[left] = None
    return NodePlan(tuple(map(tuple, within)), tuple(map(tuple, kept)), tuple(between))
