"""Exchanges rows between the ranks of ep, as a function that autograd can differentiate.

A mixture sorts its rows by expert, so the rows for one rank's experts are one block. With C the choices of
this rank's tokens and w the bytes of a row, balanced over n ranks, each exchange sends (n-1)/n x C x w bytes
per rank: one on the way to the experts and one on the way back, and both again in backward. One more
all-to-all per forward sends 8 bytes per expert, the numbers of rows. All ranks of ep must call these
functions in the same order.

Source: Lepikhin et al. 2020, "GShard", section 3.2.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.tensor.differentiable import differentiate


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return how many rows each rank sends to this rank's experts; collective.

    Args:
        counts: this rank's rows for each expert, int64 [experts]; or several numbers for each, [experts, n].
        group: the ranks of ep; each has an equal number of consecutive experts.

    Returns:
        int64 [ranks, experts of this rank], or [ranks, experts of this rank, n].
    """
    if group.size() == 1:
        return counts.unsqueeze(0)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received.view(group.size(), -1, *counts.shape[1:])


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows that the ranks send to this one, rank after rank; collective, in backward too.

    Args:
        rows: [rows, width], those for rank 0 first.
        sent: number of rows for each rank.
        received: number of rows from each rank.
    """
    if group.size() == 1:
        return rows
    return differentiate(_all_to_all, _all_to_all_back, rows, sent, received, group)


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


def _all_to_all_back(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    return _all_to_all(rows, received, sent, group)
