"""The same sum among ranks of one machine, through memory that they share.

Protocol for one vector, with one segment that all ranks have mapped:

    [ a place for the sum | a place for each subtree of all ranks ]

1. Every rank copies its subtrees into their places.
2. All ranks meet.
3. Rank r adds chunk r of all subtrees, in the order of the plan, and puts it into the place of the sum.
4. All ranks meet.
5. Every rank copies the sum out.

The memory is used again for the next vector: that of the subtrees after the second meeting, when nobody reads
them any more, and that of the sum after the first meeting of the next vector, when everybody has copied the
last one out. So the two never overlap, whatever the lengths of two vectors in a row, and the segment is as
large as the largest vector needs, not as large as the model.

A meeting is an all-to-all of one byte per pair of ranks: a library's collective, because it knows what to do
when a rank has died or hangs.

The segment is an anonymous file (memfd_create) of the first rank, which the others open through
/proc/PID/fd. It has no name, so it is gone with the last rank, however the ranks die, and it does not count
against the size of /dev/shm (64 MiB in a container by default). Where that can't be had, on any rank, all
ranks take `MessageExchange`: ranks on several machines or in containers of their own, systems other than
Linux, vectors on a GPU.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.exchange import Exchange, MessageExchange, cut_evenly
from paceline.comm.tree import Plan

log = logging.getLogger(__name__)

# Places start at a multiple of it, so that no two ranks write to one cache line.
_ALIGN_BYTES = 64
_TOKEN_BYTES = 16
# Elements added at once, so that what is added a second time still lies in the core's own cache.
_BLOCK = 1 << 16


class SharedMemoryExchange:
    """By shared memory, where all ranks are processes of one machine.

    Args:
        group: the ranks, with a backend for the CPU; nobody else may use it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.sent_bytes = 0
        self._group = group
        self._num_ranks = group.size()
        self._rank = group.rank()
        self._memory: Tensor | None = None
        self._sum_bytes = 0
        self._subtrees_bytes = 0
        self._otherwise: Exchange | None = None

    def sum_subtrees(self, subtrees: list[list[Tensor]], plan: Plan, total: Tensor) -> None:
        length, size = total.numel(), total.element_size()
        place_bytes = -(-length * size // _ALIGN_BYTES) * _ALIGN_BYTES
        self._reserve(place_bytes, plan.num_subtrees * place_bytes)
        if self._otherwise is not None:
            before = self._otherwise.sent_bytes
            self._otherwise.sum_subtrees(subtrees, plan, total)
            self.sent_bytes += self._otherwise.sent_bytes - before
            return
        assert self._memory is not None
        starts = range(self._sum_bytes, self._sum_bytes + plan.num_subtrees * place_bytes, place_bytes)
        result, *places = (
            self._memory[start : start + length * size].view(total.dtype) for start in (0, *starts)
        )
        first = sum(map(len, plan.subtrees[: self._rank]))
        for number, subtree in enumerate(subtrees, start=first):
            _lay_end_to_end(subtree, places[number])
        self._meet()
        own = cut_evenly(length, self._num_ranks)[self._rank]
        for at in range(own.start, own.stop, _BLOCK):
            block = slice(at, min(at + _BLOCK, own.stop))
            _add([place[block] for place in places], plan, result[block])
        self._meet()
        total.copy_(result)

    def _meet(self) -> None:
        """Returns when every rank is here; what they wrote before can be read then."""
        sent = torch.zeros(self._num_ranks, dtype=torch.uint8)
        dist.all_to_all_single(torch.empty_like(sent), sent, group=self._group)
        self.sent_bytes += self._num_ranks - 1

    def _reserve(self, sum_bytes: int, subtrees_bytes: int) -> None:
        """Makes both parts at least so large; the same call on all ranks decides the same."""
        is_enough = sum_bytes <= self._sum_bytes and subtrees_bytes <= self._subtrees_bytes
        if self._otherwise is not None or is_enough:
            return
        self._sum_bytes = max(self._sum_bytes, sum_bytes)
        self._subtrees_bytes = max(self._subtrees_bytes, subtrees_bytes)
        self._memory = None
        memory = self._share(self._sum_bytes + self._subtrees_bytes)
        everywhere = torch.tensor([memory is not None], dtype=torch.int32)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self._group)
        if everywhere.item():
            self._memory = memory
            return
        log.info("exact reduction: ranks share no memory, so they send messages")
        self._otherwise = MessageExchange(self._group)

    def _share(self, num_bytes: int) -> Tensor | None:
        """The segment, or `None` where this rank can't have it; collective."""
        handle, token = -1, secrets.token_bytes(_TOKEN_BYTES)
        if self._rank == 0:
            handle = _make_segment(token, num_bytes)
        box = [(os.getpid(), handle, token)]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        pid, remote, token = box[0]
        memory = None if remote < 0 else _map_segment(f"/proc/{pid}/fd/{remote}", token, num_bytes)
        dist.barrier(group=self._group)  # by then everybody has opened it
        if handle >= 0:
            os.close(handle)
        return memory


def _make_segment(token: bytes, num_bytes: int) -> int:
    """A descriptor of new anonymous memory that begins with `token`, or -1."""
    if sys.platform != "linux":
        return -1
    handle = -1
    try:
        handle = os.memfd_create("paceline-exchange", os.MFD_CLOEXEC)
        # Reserved now: running out of memory is an error here, and a SIGBUS at the first touch.
        os.posix_fallocate(handle, 0, mmap.PAGESIZE + num_bytes)
        os.pwrite(handle, token, 0)
    except OSError as error:
        log.info("exact reduction: no shared memory of %d bytes (%s)", num_bytes, error)
        if handle >= 0:
            os.close(handle)
        return -1
    return handle


def _map_segment(path: str, token: bytes, num_bytes: int) -> Tensor | None:
    """The segment's memory, or `None` where `path` is not it: the process may be another machine's."""
    try:
        with open(path, "r+b", buffering=0) as file:
            if os.pread(file.fileno(), _TOKEN_BYTES, 0) != token:
                return None
            view = mmap.mmap(file.fileno(), mmap.PAGESIZE + num_bytes)
    except (OSError, ValueError):
        return None
    if hasattr(mmap, "MADV_DONTFORK"):  # a loader worker, forked from this rank, has no use for it
        view.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(view, dtype=torch.uint8, offset=mmap.PAGESIZE)


def _lay_end_to_end(parts: list[Tensor], target: Tensor) -> None:
    """Copies tensors one after the other into a vector of their total length."""
    start = 0
    for part in parts:
        target[start : start + part.numel()].copy_(part)
        start += part.numel()
    assert start == target.numel()


def _add(rows: list[Tensor], plan: Plan, total: Tensor) -> None:
    """Adds rows in the order of the plan into `total`; overwrites them."""
    if not plan.additions:
        total.copy_(rows[0])
        return
    *steps, (left, right) = plan.additions
    for first, second in steps:
        rows[first].add_(rows[second])
    torch.add(rows[left], rows[right], out=total)
