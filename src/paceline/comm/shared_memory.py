"""Sums over ranks of one machine, in the order of a tree, through memory that they share.

If the ranks turn out to be on several nodes, `comm/by_node.py` or messages take over.

Protocol for a large vector, with one segment that all ranks have mapped:

    [ a place for the sum | a place for each subtree of all ranks ]

1. Every rank copies its subtrees into their places.
2. All ranks meet.
3. Rank r adds chunk r of all subtrees, in the order of the plan, and puts it into the place of the sum.
4. All ranks meet.
5. Every rank copies the sum out.

The memory is reused for the next vector. The subtrees' part is free after the second meeting, when no rank
reads them any more. The sum's part is free after the first meeting of the next vector, when every rank has
copied the last sum out. So the two never overlap, whatever the lengths of two consecutive vectors, and the
segment is as large as the largest vector needs, not as large as the model.

A small vector takes one meeting: after it every rank adds all of it, directly into its own memory. Meanwhile
another rank may be at the next vector, so small vectors alternate between two separate sets of places. A set
is written again only after the meeting of the vector between, which no rank joins before it has read the
first.

How ranks meet is described in `comm/meeting.py`.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.by_node import choose_between_nodes
from paceline.comm.exchange import (
    Exchange,
    MessageExchange,
    add_keeping,
    add_overwriting,
    as_real,
    cut_evenly,
)
from paceline.comm.meeting import MeetingPlace
from paceline.comm.segment import share_memory
from paceline.comm.tree import ReductionPlan

log = logging.getLogger(__name__)

# Places start at a multiple of this, so that no two ranks write to one cache line.
_ALIGN_BYTES = 64
# Each rank adds all of the ranks' subtrees itself if these take at most this together. Adding 1 MiB takes
# 0.1 ms; a second meeting takes 0.1 to 0.6 ms, and the sum would have to be copied out.
_SMALL_BYTES = 2 << 20
# Elements added at once, so that a partial sum is still in the core's own cache when it is added again.
_BLOCK = 1 << 16


def build_exchange(group: dist.ProcessGroup, device: torch.device) -> Exchange:
    """Return the exchange of exact sums over a group that no other code uses.

    On CPUs the ranks find out with their first sum how they can exchange numbers. On CUDA all messages are
    NCCL's.
    """
    return MessageExchange(group, device) if device.type != "cpu" else SharedMemoryExchange(group)


class SharedMemoryExchange:
    """An exchange by shared memory, for ranks that are all processes of one machine.

    Args:
        group: the ranks, with a backend for the CPU; no other code may use it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.sent_bytes = 0
        self._group = group
        self._num_ranks = group.size()
        self._rank = group.rank()
        self._meeting: MeetingPlace | None = None
        self._memory: Tensor | None = None
        self._turn = 0
        self._sum_bytes = 0
        self._subtrees_bytes = 0
        # Whether it is known that all ranks are of one machine; else `_otherwise` sums.
        self._is_known = False
        self._otherwise: Exchange | None = None

    def sum_subtrees(self, subtrees: list[list[Tensor]], plan: ReductionPlan, total: Tensor) -> None:
        subtrees, total = as_real(subtrees, total)
        length, size = total.numel(), total.element_size()
        place_bytes = -(-length * size // _ALIGN_BYTES) * _ALIGN_BYTES
        is_small = plan.num_subtrees * place_bytes <= _SMALL_BYTES
        if is_small:
            self._reserve(0, 0)
        else:
            self._reserve(place_bytes, plan.num_subtrees * place_bytes)
        if self._otherwise is not None:
            before = self._otherwise.sent_bytes
            self._otherwise.sum_subtrees(subtrees, plan, total)
            self.sent_bytes += self._otherwise.sent_bytes - before
            return
        assert self._memory is not None
        assert self._meeting is not None
        start = 2 * _SMALL_BYTES + self._sum_bytes
        if is_small:
            self._turn = 1 - self._turn
            start = self._turn * _SMALL_BYTES
        places = [
            self._memory[at : at + length * size].view(total.dtype)
            for at in range(start, start + plan.num_subtrees * place_bytes, place_bytes)
        ]
        first = sum(map(len, plan.subtrees[: self._rank]))
        for number, subtree in enumerate(subtrees, start=first):
            _lay_end_to_end(subtree, places[number])
        self.sent_bytes += self._meeting.meet()
        if is_small:
            add_keeping(dict(enumerate(places)), plan.additions, total)
            return
        result = self._memory[2 * _SMALL_BYTES : 2 * _SMALL_BYTES + length * size].view(total.dtype)
        own = cut_evenly(length, self._num_ranks)[self._rank]
        for at in range(own.start, own.stop, _BLOCK):
            block = slice(at, min(at + _BLOCK, own.stop))
            rows = {number: place[block] for number, place in enumerate(places)}
            add_overwriting(rows, plan.additions, result[block])
        self.sent_bytes += self._meeting.meet()
        total.copy_(result)

    def _reserve(self, sum_bytes: int, subtrees_bytes: int) -> None:
        """Make both parts at least this large; the same call on all ranks decides the same."""
        is_enough = sum_bytes <= self._sum_bytes and subtrees_bytes <= self._subtrees_bytes
        if self._otherwise is not None or (is_enough and self._memory is not None):
            return
        self._sum_bytes = max(self._sum_bytes, sum_bytes)
        self._subtrees_bytes = max(self._subtrees_bytes, subtrees_bytes)
        self._memory = None
        if not self._is_known:
            self._is_known, self._otherwise = True, choose_between_nodes(self._group)
            if self._otherwise is not None:
                return
            self._meeting = MeetingPlace(self._group)
            if self._rank == 0:
                log.info("exact reduction: %d ranks of one machine add in shared memory", self._num_ranks)
        num_bytes = 2 * _SMALL_BYTES + self._sum_bytes + self._subtrees_bytes
        self._memory = share_memory(self._group, num_bytes)
        if self._memory is None:
            log.info("exact reduction: shared memory is not available, so ranks send messages")
            self._otherwise = MessageExchange(self._group)


def _lay_end_to_end(parts: list[Tensor], target: Tensor) -> None:
    """Copy tensors one after the other into a vector of their total length."""
    start = 0
    for part in parts:
        target[start : start + part.numel()].copy_(part)
        start += part.numel()
    assert start == target.numel()
