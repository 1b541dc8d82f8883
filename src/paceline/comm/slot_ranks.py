"""Adds the gradients of a slot exactly, over the ranks that share the slot.

With fewer slots than ranks, an equal number of consecutive ranks share a slot: those of one node. They own
consecutive microbatches of the slot, so their subtrees are those of the tree over the slot's microbatches.

Protocol for some rows of parameters on g ranks:

1. The rows are divided into g columns; column i is rank i's to add. Every rank sends rank i that column of
   each of its subtrees, in fp32.
2. Rank i adds its column of all subtrees, in the order of the tree.

So a slot's gradient has the same bits as on one rank. Afterwards each rank has its column alone, and encodes
and sends only that. Sent per rank, inside the node: k (g - 1)/g times the gradient, with k subtrees per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.exchange import pass_on
from paceline.comm.residuals import RowRange
from paceline.comm.tree import ReductionPlan

# The rows of a piece in one of the own subtrees; `None` where no gradient has reached them.
FindRows = Callable[[int, RowRange], Tensor | None]


def count_sharing(num_slots: int, num_ranks: int) -> int:
    """Return how many ranks share a slot; 1 if ranks have whole slots."""
    assert num_slots % num_ranks == 0 or num_ranks % num_slots == 0, (num_slots, num_ranks)
    return max(1, num_ranks // num_slots)


def list_own_slots(num_slots: int, num_ranks: int, rank: int) -> range:
    """Return the numbers of the slots that a rank has, or of the one that it shares."""
    sharing = count_sharing(num_slots, num_ranks)
    if sharing > 1:
        return range(rank // sharing, rank // sharing + 1)
    per_rank = num_slots // num_ranks
    return range(rank * per_rank, (rank + 1) * per_rank)


def add_columns(
    group: dist.ProcessGroup,
    sharing: int,
    plan: ReductionPlan,
    columns: Sequence[Sequence[RowRange]],
    find_rows: FindRows,
    device: torch.device,
) -> tuple[dict[RowRange, Tensor], int]:
    """Return this rank's column of its slot's gradient, and the bytes sent; collective over the slot's ranks.

    Args:
        group: the ranks of all slots, used for nothing else at the same time.
        sharing: ranks per slot.
        plan: the slot's microbatches by its ranks.
        columns: by rank of the slot, the rows that it adds; the same on all of them.
        find_rows: from an own subtree's number and a piece of `columns` to its rows [num_rows, length].
        device: of the gradients.

    Returns:
        The rows by piece, in memory of their own; none if the slot has no microbatch.
    """
    place, first = group.rank() % sharing, group.rank() // sharing * sharing
    num_own = len(plan.subtrees[place])
    if not plan.num_leaves:
        return {}, 0
    departures = [
        (first + mate, _lay_out(number, columns[mate], find_rows, device))
        for mate in range(sharing)
        if mate != place
        for number in range(num_own)
    ]
    length = _count(columns[place])
    rows: list[Tensor] = []
    arrivals: list[tuple[int, Tensor]] = []
    for mate, subtrees in enumerate(plan.subtrees):
        for number in range(len(subtrees)):
            if mate == place:
                rows.append(_lay_out(number, columns[place], find_rows, device))
            else:
                rows.append(torch.empty(length, device=device))
                arrivals.append((first + mate, rows[-1]))
    sent_bytes = pass_on(group, departures, arrivals)
    for left, right in plan.additions:
        rows[left].add_(rows[right])
    sizes = [piece.num_rows * piece.length for piece in columns[place]]
    parts = torch.split(rows[0], sizes) if sizes else ()
    found = {
        piece: part.view(piece.num_rows, piece.length)
        for piece, part in zip(columns[place], parts, strict=True)
    }
    return found, sent_bytes


def _count(pieces: Sequence[RowRange]) -> int:
    return sum(piece.num_rows * piece.length for piece in pieces)


def _lay_out(number: int, pieces: Sequence[RowRange], find_rows: FindRows, device: torch.device) -> Tensor:
    """Return the rows of some pieces end to end. What is missing changes no bit of a sum: x + -0.0 is x."""
    vector = torch.empty(_count(pieces), device=device)
    at = 0
    for piece in pieces:
        target = vector[at : at + piece.num_rows * piece.length]
        rows = find_rows(number, piece)
        if rows is None:
            target.fill_(-0.0)
        else:
            target.view(piece.num_rows, piece.length).copy_(rows)
        at += target.numel()
    return vector
