"""Adds what ranks hold in the order of a tree, and gives every rank the sum.

Protocol for a vector of n elements on W ranks, of which rank r brings k_r nodes of the tree:

1. The vector is cut into W chunks; chunk r is rank r's to add. All-to-all: every rank sends each of its
   nodes' chunk r to rank r.
2. Every rank adds its chunk of all nodes in the order of the plan.
3. All-gather of the chunks.

Sent per rank: (k + 1)(W - 1)/W n elements. With one node per rank that is a ring all-reduce's
2(W - 1)/W n; with uneven shares (k = 2 or more) it is (k + 1)/2 times as much.

An exchange issues its collectives one after the other, on a group that nobody else uses, so their order
is that of the calls. All ranks must make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from paceline.comm.tree import Plan

# torch 2.13 renamed it and deprecates the old name.
_all_gather: Callable[..., Any] = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


class Exchange(Protocol):
    """A way to sum over ranks.

    Attributes:
        sent_bytes: what this rank has sent to others so far.
    """

    sent_bytes: int

    def sum_nodes(self, nodes: list[list[Tensor]], plan: Plan, total: Tensor) -> None:
        """Sums the nodes of all ranks into `total`; collective.

        Args:
            nodes: this rank's, each as one-dimensional tensors that laid end to end have the length of
                `total`. The last one may be `[total]`. Only read.
            plan: which nodes each rank brings and how they are added.
            total: one-dimensional and contiguous; holds the same bits on every rank afterwards.
        """


class CollectiveExchange:
    """By the library's collectives, over any network.

    Args:
        group: the ranks; nobody else may use it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.sent_bytes = 0
        self._group = group
        self._num_ranks = group.size()
        self._rank = group.rank()

    def sum_nodes(self, nodes: list[list[Tensor]], plan: Plan, total: Tensor) -> None:
        num_ranks, length = self._num_ranks, total.numel()
        chunk = -(-length // num_ranks)
        is_even = length == chunk * num_ranks
        counts = [len(own) for own in plan.nodes]
        assert len(nodes) == counts[self._rank]
        if is_even and len(nodes) == 1 and nodes[0][0] is total:
            sent = total
        else:
            sent = total.new_empty(num_ranks, len(nodes), chunk)
            flat = total.new_zeros(num_ranks * chunk)  # zeros, so that no padding is ever computed with
            for number, node in enumerate(nodes):
                lay_end_to_end(node, flat[:length])
                sent[:, number] = flat.view(num_ranks, chunk)
        received = total.new_empty(plan.num_nodes, chunk)
        dist.all_to_all_single(
            received.view(-1),
            sent.view(-1),
            [count * chunk for count in counts],
            [len(nodes) * chunk] * num_ranks,
            group=self._group,
        )
        for left, right in plan.additions:
            received[left].add_(received[right])
        gathered = total if is_even else total.new_empty(num_ranks * chunk)
        _all_gather(gathered, received[0], group=self._group)
        if gathered is not total:
            total.copy_(gathered[:length])
        self.sent_bytes += (len(nodes) + 1) * (num_ranks - 1) * chunk * total.element_size()


def lay_end_to_end(parts: list[Tensor], target: Tensor) -> None:
    """Copies tensors one after the other into a vector of their total length."""
    start = 0
    for part in parts:
        target[start : start + part.numel()].copy_(part)
        start += part.numel()
    assert start == target.numel()
