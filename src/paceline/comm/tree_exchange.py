"""Adds the vectors of all ranks in the order of a tree, and returns the sum on every rank.

Protocol for a vector of n elements on W ranks, where rank r contributes k_r subtrees of the tree:

1. The vector is cut into W chunks; chunk r is rank r's to add. Every rank sends rank r that chunk of each
   of its subtrees.
2. Every rank adds its chunk of all subtrees in the order of the plan.
3. Every rank sends its chunk of the sum to all others; or with shards to those with the same shard.

Sent per rank: (k + 1)(W - 1)/W n elements. With one subtree per rank that is a ring all-reduce's
2(W - 1)/W n; with uneven shares (k = 2 or more) it is (k + 1)/2 times as much.

One message after another costs latency. So a small vector is one chunk, which every rank receives and adds.

Two ranks with one subtree each need one addition, and a + b has the bits of b + a. So they call the library's
all-reduce, which is faster.

An exchange issues its messages one vector after the other, on a group that nothing else uses, so their order
is that of the calls. All ranks must make the same calls.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.tree import ReductionPlan

# Vectors up to this size travel whole, although that sends more.
WHOLE_BYTES = 8 << 10


def nothing_like(tensor: Tensor) -> Tensor:
    """Return zeros that change no bit of a sum: x + -0.0 is x, also for -0.0."""
    return torch.full_like(tensor, complex(-0.0, -0.0) if tensor.is_complex() else -0.0)


def _as_real(vector: Tensor) -> Tensor:
    """Return a complex vector as twice as many real numbers, and another one itself."""
    return torch.view_as_real(vector.resolve_conj()).view(-1) if vector.is_complex() else vector


class Exchange:
    """Sums over the ranks of a group.

    With gloo, messages that are sent and received in place take as long as an all-reduce; all-to-all and
    all-gather, which copy, take longer (benchmarks/exact_reduction/exchange.py).

    Args:
        group: the ranks; no other code may use it.
        device: where the vectors are.

    Attributes:
        sent_bytes: what this rank has sent to others so far.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> None:
        self.sent_bytes = 0
        self._device = device
        self._group = group
        self._num_ranks = group.size()
        self._rank = group.rank()
        self._peers = [peer for peer in range(self._num_ranks) if peer != self._rank]
        # Kept from vector to vector: fresh memory costs a page fault for every 4 KiB.
        self._memory: dict[torch.dtype, Tensor] = {}

    def sum_subtrees(
        self, subtrees: list[Tensor], plan: ReductionPlan, total: Tensor, num_shards: int = 1
    ) -> None:
        """Sum the subtrees of all ranks into `total`; collective.

        Args:
            subtrees: this rank's, as long as `total`. The last one may be `total`. May be overwritten.
            plan: which subtrees each rank brings and how they are added.
            total: one-dimensional and contiguous. Afterwards its part `rank % num_shards` holds the same bits
                as on the other ranks with that part.
            num_shards: equal parts of the vector, each of which is wanted by other ranks.
        """
        total, subtrees = _as_real(total), [_as_real(subtree) for subtree in subtrees]
        if num_shards == 1 and [len(own) for own in plan.subtrees] == [1, 1]:
            total.copy_(subtrees[0])  # nothing, where both are the same memory
            dist.all_reduce(total, group=self._group)
            self.sent_bytes += total.nbytes
            return
        is_whole = num_shards == 1 and total.nbytes <= WHOLE_BYTES
        chunks = [slice(0, total.numel())] * self._num_ranks
        if not is_whole:
            chunks = cut_chunks(total.numel(), self._num_ranks, num_shards)
        own = chunks[self._rank]
        own_rows = [subtree[own] for subtree in subtrees]
        rows, arrivals = self._place_rows(own_rows, plan, own.stop - own.start, total.dtype)
        departures = [(peer, subtree[chunks[peer]]) for peer in self._peers for subtree in subtrees]
        self._pass_on(departures, arrivals)
        for left, right in plan.additions:
            rows[left].add_(rows[right])
        total[own].copy_(rows[0])
        if is_whole:
            return
        twins = [peer for peer in self._peers if (peer - self._rank) % num_shards == 0]
        self._pass_on([(peer, total[own]) for peer in twins], [(peer, total[chunks[peer]]) for peer in twins])

    def _place_rows(
        self, own_rows: list[Tensor], plan: ReductionPlan, length: int, dtype: torch.dtype
    ) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
        """Return this rank's chunk of all subtrees, in the order of the plan, and those that arrive from
        peers."""
        needed = (plan.num_subtrees - len(own_rows)) * length
        memory = self._memory.get(dtype)
        if memory is None or memory.numel() < needed:
            memory = self._memory[dtype] = torch.empty(needed, dtype=dtype, device=self._device)
        rows: list[Tensor] = []
        arrivals: list[tuple[int, Tensor]] = []
        for rank, brought in enumerate(plan.subtrees):
            if rank == self._rank:
                assert len(brought) == len(own_rows)
                rows += own_rows
                continue
            for _ in brought:
                start = len(arrivals) * length
                arrivals.append((rank, memory[start : start + length]))
                rows.append(arrivals[-1][1])
        return rows, arrivals

    def _pass_on(self, departures: list[tuple[int, Tensor]], arrivals: list[tuple[int, Tensor]]) -> None:
        """Send and receive, in the order of the lists between any two ranks."""
        self.sent_bytes += pass_on(self._group, departures, arrivals)


def pass_on(
    group: dist.ProcessGroup, departures: list[tuple[int, Tensor]], arrivals: list[tuple[int, Tensor]]
) -> int:
    """Send and receive, in the order of the lists between any two ranks; return the bytes sent.

    Receives are posted first. gloo sends a message once the peer has said that it receives it, and says so on
    the connection that also carries the data: behind a large message of its own, that would wait for its
    last byte, and the two directions of a link would take turns.

    Args:
        departures, arrivals: messages as (rank in the group, contiguous tensor); empty ones are left out.
    """
    messages = [
        dist.P2POp(kind, tensor, group=group, group_peer=peer)
        for kind, tensors in ((dist.irecv, arrivals), (dist.isend, departures))
        for peer, tensor in tensors
        if tensor.numel()
    ]
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    return sum(tensor.numel() * tensor.element_size() for _, tensor in departures)


def cut_chunks(length: int, num_ranks: int, num_shards: int = 1) -> list[slice]:
    """Return the part of a vector that each rank adds: of its shard, an equal share with the other replicas.

    The last replicas' parts may be shorter or empty.
    """
    num_replicas, shard_length = num_ranks // num_shards, length // num_shards
    size = -(-shard_length // num_replicas)
    chunks = []
    for rank in range(num_ranks):
        start, replica = rank % num_shards * shard_length, rank // num_shards
        chunks.append(
            slice(start + min(replica * size, shard_length), start + min((replica + 1) * size, shard_length))
        )
    return chunks
