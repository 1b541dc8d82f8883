"""Collectives by point-to-point messages, against what torch's own give."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.comm import collectives
from paceline.comm.collectives import (
    broadcast_in_pipeline,
    gather_directly,
    reduce_scatter_directly,
    sum_directly,
)
from paceline.plan.collectives import PIPELINE_BYTES
from paceline.world import World
from tests.dist.pool import Pool

LENGTHS = (1, 7, 1000, PIPELINE_BYTES // 4 + 3)


def numbers(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + length)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    return (values * 1000).to(dtype)


def sum_on_rank(world: World) -> list[torch.Tensor]:
    found = []
    for dtype in (torch.float32, torch.float64, torch.int64):
        for length in LENGTHS:
            tensor = numbers(world.rank, length, dtype)
            sum_directly(tensor)
            found.append(tensor)
    return found


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_a_direct_sum_has_the_bits_of_additions_in_the_order_of_ranks(ranks: Pool, nproc: int) -> None:
    expected = []
    for dtype in (torch.float32, torch.float64, torch.int64):
        for length in LENGTHS:
            total = numbers(0, length, dtype)
            for rank in range(1, nproc):
                total += numbers(rank, length, dtype)
            expected.append(total)
    for found in ranks.run(sum_on_rank, nproc=nproc):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def reduce_scatter_on_rank(world: World) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for length in LENGTHS:
        tensor = numbers(world.rank, length * world.world_size, torch.float64)
        before, output = tensor.clone(), torch.empty(length, dtype=torch.float64)
        reduce_scatter_directly(output, tensor)
        assert torch.equal(tensor, before)
        dist.all_reduce(tensor)
        found.append((output, tensor.view(world.world_size, -1)[world.rank].clone()))
    return found


def test_a_direct_reduce_scatter_gives_each_rank_its_part_of_the_sum(ranks: Pool) -> None:
    for found in ranks.run(reduce_scatter_on_rank, nproc=3):
        for output, expected in found:
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-9)


def broadcast_on_rank(world: World) -> list[torch.Tensor]:
    found = []
    for length in (*LENGTHS, 5 * PIPELINE_BYTES // 4):
        tensor = numbers(world.rank, length)
        broadcast_in_pipeline(tensor)
        found.append(tensor)
    return found


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_a_pipelined_broadcast_gives_every_rank_the_roots_numbers(ranks: Pool, nproc: int) -> None:
    for found in ranks.run(broadcast_on_rank, nproc=nproc):
        for tensor, length in zip(found, (*LENGTHS, 5 * PIPELINE_BYTES // 4), strict=True):
            assert torch.equal(tensor, numbers(0, length))


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
