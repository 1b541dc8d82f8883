"""A gather in one round trip, against the vectors of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline.comm import collectives
from paceline.comm.collectives import gather_directly
from paceline.world import World
from tests.dist.pool import Pool

LENGTHS = (1, 7, 1000, 65_539)


def numbers(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + length)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    return (values * 1000).to(dtype)


def gather_on_rank(world: World) -> list[torch.Tensor]:
    found = [gather_directly(numbers(world.rank, length), dist.group.WORLD) for length in LENGTHS]  # type: ignore[arg-type]
    assert dist.group.WORLD is not None
    most, collectives._MOST_GATHERED_BYTES = collectives._MOST_GATHERED_BYTES, 0
    try:
        found.append(gather_directly(numbers(world.rank, 7), dist.group.WORLD))
    finally:
        collectives._MOST_GATHERED_BYTES = most
    return found


def test_a_direct_gather_has_one_row_per_rank(ranks: Pool) -> None:
    for found in ranks.run(gather_on_rank, nproc=3):
        for length, rows in zip((*LENGTHS, 7), found, strict=True):
            assert torch.equal(rows, torch.stack([numbers(rank, length) for rank in range(3)]))
