"""Predicts the seconds of an exact sum over ranks by algorithm, from a table of links; without torch.

The algorithms add in the same order (`comm/tree.py`), so they yield the same bits. Unless a number is given,
each rank is taken to bring one subtree, as with equal shares that are powers of two. Each machine of
consecutive ranks is taken to bring one sum:

- `direct`: messages between all pairs of ranks (`comm/exchange.py`).
- `shared-memory`: for ranks of one machine (`comm/shared_memory.py`).
- `by-node`: for several machines, one of which has several ranks (`comm/by_node.py`).

A machine is a set of ranks that may share memory. A node is a set of ranks between which the links were
measured as links within a node. Two containers of one host are two machines and one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from paceline.plan.collectives import Edge, Phase, list_phases, time_phases
from paceline.plan.links import Links

# direct: vectors up to this size travel whole. One message after another costs latency.
DIRECT_WHOLE_BYTES = 8 << 10
# shared-memory: maximum size of all ranks' subtrees together for which each rank adds all of them. Adding 1
# MiB takes 0.1 ms; a second meeting takes 0.1 to 0.6 ms, and the sum would have to be copied out.
SHARED_SMALL_BYTES = 2 << 20
# by-node: a vector up to this size takes one message between nodes instead of two, although it sends more
# bytes.
NODE_SMALL_BYTES = 32 << 10
# by-node: smaller blocks cost more meetings, larger ones leave the link idle at the first and the last block.
NODE_LEAST_BLOCK_BYTES = 512 << 10
NODE_MOST_BLOCK_BYTES = 4 << 20
NODE_USUAL_BLOCKS = 8


def list_exact_sums(machines: Sequence[int]) -> list[str]:
    """Return the algorithms that suit ranks, from each rank's machine; the fixed rule takes the first."""
    if len(set(machines)) == 1:
        return ["shared-memory", "direct"]
    return ["direct"] if len(set(machines)) == len(machines) else ["by-node", "direct"]


def predict_exact_sum(
    algorithm: str, sizes: Iterable[int], machines: Sequence[int], nodes: Sequence[int], links: Links
) -> float:
    """Return the seconds of a step's sums, one after the other.

    Args:
        algorithm: of `list_exact_sums(machines)`.
        sizes: bytes of each sum.
        machines: each rank's machine.
        nodes: each rank's node.
        links: with every class of pairs that the ranks have.
    """
    return sum(time_phases(list_exact_phases(algorithm, size, machines), nodes, links) for size in sizes)


def list_exact_phases(
    algorithm: str, num_bytes: float, machines: Sequence[int], num_subtrees: int = 1
) -> list[Phase]:
    """Return the phases of one exact sum; the other arguments are those of `predict_exact_sum`.

    Args:
        num_subtrees: that each rank brings.
    """
    return _PHASES[algorithm](num_bytes, machines, num_subtrees)


def count_subtrees(start: int, stop: int, num_leaves: int) -> int:
    """Return the number of whole subtrees in a block of microbatches, as `comm/tree.py` divides it.

    Args:
        start, stop: the block.
        num_leaves: microbatches of the whole tree.
    """
    count = 0
    while start < stop:
        span = 1
        # A subtree begins at a multiple of its span; the last one may end with the last microbatch.
        while start % (2 * span) == 0 and span < stop - start and min(start + 2 * span, num_leaves) <= stop:
            span *= 2
        start, count = min(start + span, num_leaves), count + 1
    return count


def _direct(size: float, machines: Sequence[int], num_subtrees: int) -> list[Phase]:
    """Model one exchange of whole vectors for a small one, else of chunks and then of their sums."""
    brought = num_subtrees * size
    if size <= DIRECT_WHOLE_BYTES:
        return list_phases("all_reduce", "direct", brought, machines)
    return [
        *list_phases("reduce_scatter", "direct", brought, machines),
        *list_phases("all_gather", "direct", size, machines),
    ]


def _shared_memory(size: float, machines: Sequence[int], num_subtrees: int) -> list[Phase]:
    """Model copying in, a meeting and adding; for a large vector also a second meeting and copying out."""
    num_ranks = len(machines)
    edges = tuple((a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b)
    meeting = Phase("meeting", 1, 0.0, edges)
    brought, added = num_subtrees * size, (num_ranks * num_subtrees - 1) * size
    if num_ranks * brought <= SHARED_SMALL_BYTES:
        return [replace(meeting, copied=brought, added=added)]
    return [replace(meeting, copied=brought, added=added / num_ranks), replace(meeting, copied=size)]


def _by_node(size: float, machines: Sequence[int], num_subtrees: int) -> list[Phase]:
    """Model copying in and out, meetings in each machine, and twins that exchange their slices.

    The blocks overlap. So both messages of a twin count in each turn, and one more message at the end.
    """
    members = [[r for r, at in enumerate(machines) if at == name] for name in dict.fromkeys(machines)]
    num_machines, num_slices, num_blocks = len(members), max(map(len, members)), _count_blocks(size)
    kept = 1 if list(machines) == sorted(machines) else num_slices
    is_direct = size <= NODE_SMALL_BYTES or (num_machines == 2 and kept == 1)
    piece = size / num_slices / num_blocks / (1 if is_direct else num_machines)
    twins: list[Edge] = []
    for number in range(num_slices):
        ranks = [local[number % len(local)] for local in members]
        twins += [(a, b) for a in ranks for b in ranks if a != b]
    added = (num_slices + num_machines - 2) * size / num_slices
    sent = piece * (kept if is_direct else kept + 1)
    across = Phase("exchange", num_blocks, sent, tuple(twins), added=added)
    phases = [across]
    if not is_direct:
        phases.append(Phase("exchange", 1, piece, tuple(twins), is_fill=True))
    # Ranks meet when a block is new and when it is old, three turns later.
    turns = num_blocks + min(3, num_blocks)
    phases += [
        Phase("exchange", turns, 1.0, edges, copied=(num_subtrees + 1) * size if number == 0 else 0.0)
        for number, edges in enumerate(_list_rounds(members))
    ]
    return phases


def _count_blocks(size: float) -> int:
    block = min(max(size // NODE_USUAL_BLOCKS, NODE_LEAST_BLOCK_BYTES), NODE_MOST_BLOCK_BYTES)
    return max(1, int(-(-size // block)))


def _list_rounds(members: Sequence[Sequence[int]]) -> list[tuple[Edge, ...]]:
    """Return the rounds of a meeting in every machine: in round i, ranks send to the one 2^i after them."""
    most = max(map(len, members))
    distances = [1 << number for number in range((most - 1).bit_length())]
    return [
        tuple(
            (rank, local[(place + distance) % len(local)])
            for local in members
            if distance < len(local)
            for place, rank in enumerate(local)
        )
        for distance in distances
    ]


_PHASES: Mapping[str, Callable[[float, Sequence[int], int], list[Phase]]] = {
    "shared-memory": _shared_memory,
    "by-node": _by_node,
    "direct": _direct,
}
