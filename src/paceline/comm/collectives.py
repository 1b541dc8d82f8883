"""Collectives that take fewer round trips or bytes than gloo's own.

All ranks must call them, with tensors of the same size and dtype.

- `gather_directly`: every rank sends its vector to all others at once. One round trip; gloo's ring takes N-1.

The others are for tensors in CPU memory, by point-to-point messages; the sums for the default group:

- `sum_directly`: every rank sends its vector to all others and adds all of them in the order of ranks, so the
  result has the same bits on every rank. One round trip; gloo's ring takes 2 (N-1).
- `reduce_scatter_directly`: every rank sends each other rank its part. (N-1)/N S bytes per rank; gloo's is an
  all-reduce, which sends twice as much.
- `broadcast_in_pipeline`: a chain of ranks passes on segments. S bytes per rank; the root of gloo's tree
  sends log2(N) times as much.

`paceline.plan.collectives` predicts them as the algorithms "direct" and "pipeline", and
`paceline bench collectives` measures them beside gloo's. Training uses `gather_directly`, and
`broadcast_in_pipeline` where `comm/algorithms.py` chooses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.plan.collectives import PIPELINE_BYTES

# A larger vector takes the library's all-gather: latency matters less, and a direct one copies it N times.
_MOST_GATHERED_BYTES = 1 << 20


def gather_directly(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the vectors of all ranks of a group, one per row.

    On CUDA and for large vectors it is the library's all-gather. The rows have the same bits.
    """
    num_ranks = group.size()
    gathered = own.new_empty(num_ranks, own.numel())
    if own.is_cuda or gathered.numel() * gathered.element_size() > _MOST_GATHERED_BYTES:
        dist.all_gather(list(gathered.unbind(0)), own, group=group)
    else:
        dist.all_to_all_single(gathered.view(-1), own.repeat(num_ranks), group=group)
    return gathered


def sum_directly(tensor: Tensor) -> None:
    """Replace a contiguous tensor by the sum over all ranks, in the order of ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    rows = torch.empty(num_ranks, tensor.numel(), dtype=tensor.dtype)
    rows[rank] = tensor.view(-1)
    _exchange([rows[rank]] * num_ranks, list(rows), rank)
    _add_rows(rows, tensor.view(-1))


def reduce_scatter_directly(output: Tensor, tensor: Tensor) -> None:
    """Sum a contiguous tensor over all ranks, and keep this rank's part of the result.

    Args:
        output: of `tensor.numel() / N` elements, contiguous.
        tensor: N parts, laid end to end; not changed.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    parts = tensor.view(num_ranks, -1)
    rows = torch.empty_like(parts)
    rows[rank] = parts[rank]
    _exchange(list(parts), list(rows), rank)
    _add_rows(rows, output.view(-1))


def broadcast_in_pipeline(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Send rank 0's contiguous tensor to all ranks; rank r receives from r - 1 and passes on to r + 1.

    Args:
        tensor: of the same size and dtype on every rank.
        group: whose ranks are meant; the default group's otherwise.
    """
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    segments = torch.split(tensor.view(-1), max(1, PIPELINE_BYTES // tensor.element_size()))
    arrivals = (
        [dist.irecv(segment, group=group, group_src=rank - 1) for segment in segments] if rank > 0 else []
    )
    departures = []
    for number, segment in enumerate(segments):
        if rank > 0:
            _wait(arrivals[number])
        if rank < last:
            departures.append(dist.isend(segment, group=group, group_dst=rank + 1))
    for work in departures:
        _wait(work)


def _exchange(sent: Sequence[Tensor], received: Sequence[Tensor], rank: int) -> None:
    """Send each other rank its tensor and receive one from it, all at once."""
    peers = [peer for peer in range(len(sent)) if peer != rank]
    works = [dist.irecv(received[peer], peer) for peer in peers]
    works += [dist.isend(sent[peer], peer) for peer in peers]
    for work in works:
        _wait(work)


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def _add_rows(rows: Tensor, total: Tensor) -> None:
    """Add rows one after the other: torch's own sum may take another order."""
    total.copy_(rows[0])
    for row in rows[1:]:
        total.add_(row)
