"""Tensors that travel together, against those of the first rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import buckets
from paceline.comm.buckets import broadcast_tensors
from tests.dist.pool import Pool


def make_tensors(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    wide = torch.randn(40, 30, generator=generator)
    return [
        wide,
        torch.randn(3, 4, 5, 6, generator=generator).to(memory_format=torch.channels_last),
        torch.tensor(float(rank), dtype=torch.float64),
        torch.randn(7, generator=generator).to(torch.bfloat16),
        torch.tensor([rank == 0, True]),
        torch.zeros(0, 3),
        torch.arange(5) + rank,
        torch.randn(50, 60, generator=generator)[:, ::2],
        torch.randn(9, generator=generator),
    ]


def send(world: Any, bucket_bytes: int) -> tuple[bool, int]:
    tensors, calls, original = make_tensors(world.rank), [0], dist.broadcast
    strides = [tensor.stride() for tensor in tensors]

    def count(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    dist.broadcast, before = count, buckets._BUCKET_BYTES
    buckets._BUCKET_BYTES = bucket_bytes
    try:
        broadcast_tensors(tensors)
    finally:
        dist.broadcast, buckets._BUCKET_BYTES = original, before
    is_same = all(torch.equal(a, b) for a, b in zip(tensors, make_tensors(0), strict=True))
    return is_same and strides == [tensor.stride() for tensor in tensors], calls[0]


@pytest.mark.parametrize(("bucket_bytes", "calls"), [(1 << 20, 5), (5000, 8)])
def test_every_rank_gets_the_first_ones_in_few_messages(ranks: Pool, bucket_bytes: int, calls: int) -> None:
    assert ranks.run(send, 3, (bucket_bytes,)) == [(True, calls)] * 3
