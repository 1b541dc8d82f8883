"""Sums over real ranks in the order of the tree, by messages."""

from __future__ import annotations

import os
import random
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.tree import TreeSum, plan_reduction
from paceline.comm.tree_exchange import Exchange
from tests.dist.pool import Pool, RankError


def draw_leaves(num_leaves: int, length: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Of many sizes, so that another order of additions has other last bits almost everywhere.
    return [
        (
            torch.randn(length, generator=generator, dtype=torch.float64)
            * 10 ** torch.empty(length, dtype=torch.float64).uniform_(-3, 3, generator=generator)
        ).to(dtype)
        for _ in range(num_leaves)
    ]


def sum_alone(leaves: list[Tensor]) -> Tensor:
    tree: TreeSum[Tensor] = TreeSum(len(leaves), torch.add)
    for number, leaf in enumerate(leaves):
        tree.push((number, number + 1), leaf)
    return tree.subtrees[0][1]


def sum_on_ranks(
    exchange: Exchange, shares: tuple[int, ...], leaves: list[Tensor], num_shards: int = 1
) -> Tensor:
    plan, rank = plan_reduction(shares), dist.get_rank()
    first = sum(shares[:rank])
    tree: TreeSum[Tensor] = TreeSum(len(leaves), torch.add)
    for leaf in range(first, first + shares[rank]):
        tree.push((leaf, leaf + 1), leaves[leaf])
    total = torch.full_like(leaves[0], torch.nan)
    subtrees = [value for _, value in tree.subtrees]
    if subtrees:  # as a bucket does: the last subtree is where the sum goes
        total.copy_(subtrees[-1])
        subtrees[-1] = total
    exchange.sum_subtrees(subtrees, plan, total, num_shards)
    return total


def exchange_many(world: Any, cases: list[tuple[tuple[int, ...], int, str]]) -> int:
    exchange, chance = Exchange(dist.group.WORLD), random.Random(world.rank)  # type: ignore[arg-type]
    num_wrong = 0
    for seed, (shares, length, dtype) in enumerate(cases):
        leaves = draw_leaves(sum(shares), length, getattr(torch, dtype), seed)
        time.sleep(chance.uniform(0, 0.004))
        total = sum_on_ranks(exchange, shares, leaves)
        num_wrong += not torch.equal(total, sum_alone(leaves))
    return num_wrong


def list_cases(num_ranks: int) -> list[tuple[tuple[int, ...], int, str]]:
    chance = random.Random(num_ranks)
    cases = [((1,) * num_ranks, 1_100_000, "float32")]  # too large for a pair of ranks to send it whole
    for _ in range(40):
        shares = tuple(chance.choice([0, 1, 1, 2, 3, 4, 5, 8]) for _ in range(num_ranks))
        length = chance.choice([1, 2, 3, 7, 64, 1000, 65_537, 140_001])
        if any(shares):
            cases.append((shares, length, chance.choice(["float32", "float64"])))
    return cases


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_sums_are_those_of_one_process(ranks: Pool, nproc: int) -> None:
    assert ranks.run(exchange_many, nproc, (list_cases(nproc),)) == [0] * nproc


def count_bytes(world: Any, shares: tuple[int, ...], length: int) -> int:
    exchange = Exchange(dist.group.WORLD)  # type: ignore[arg-type]
    sum_on_ranks(exchange, shares, draw_leaves(sum(shares), length, torch.float32, 0))
    return exchange.sent_bytes


@pytest.mark.parametrize(
    ("shares", "subtrees"),
    [((1, 1), 1), ((3, 1), 2), ((1, 1, 1, 1), 1), ((2, 2, 2, 2), 1), ((3, 3, 3, 3), 2), ((5, 5, 3, 3), 3)],
)
def test_bytes_are_a_rings_where_each_rank_owns_one_node(
    ranks: Pool, shares: tuple[int, ...], subtrees: int
) -> None:
    ring = 2 * (len(shares) - 1) / len(shares) * 4000 * 4
    sent = ranks.run(count_bytes, len(shares), (shares, 4000))
    assert max(sent) == ring * (subtrees + 1) / 2


def sum_shards(world: Any, num_shards: int, shares: tuple[int, ...]) -> tuple[bool, int]:
    exchange = Exchange(dist.group.WORLD)  # type: ignore[arg-type]
    leaves = draw_leaves(sum(shares), 12_012, torch.float32, 0)
    total = sum_on_ranks(exchange, shares, leaves, num_shards)
    own, expected = (
        each.view(num_shards, -1)[world.rank % num_shards] for each in (total, sum_alone(leaves))
    )
    return torch.equal(own, expected), exchange.sent_bytes


@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("shares", [(1, 1, 1, 1), (3, 2, 2, 0)])
def test_a_rank_gets_the_rows_of_its_shard(ranks: Pool, num_shards: int, shares: tuple[int, ...]) -> None:
    found = ranks.run(sum_shards, 4, (num_shards, shares))
    assert [is_right for is_right, _ in found] == [True] * 4
    if shares == (1, 1, 1, 1):  # three quarters of a vector, then the own quarter to the other replica
        assert max(sent for _, sent in found) == 48_048 * (0.75 + (0.25 if num_shards == 2 else 0))


def die_before_the_second_sum(world: Any) -> None:
    exchange = Exchange(dist.group.WORLD)  # type: ignore[arg-type]
    leaves = draw_leaves(2, 100, torch.float32, 0)
    sum_on_ranks(exchange, (1, 1), leaves)
    if world.rank == 1:
        os.kill(os.getpid(), 9)
    sum_on_ranks(exchange, (1, 1), leaves)


def test_a_dead_rank_is_an_error_and_no_hang(ranks: Pool) -> None:
    started_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(die_before_the_second_sum)
    assert caught.value.exit_codes == {1: -9}
    assert re.search("Connection (closed|reset) by peer", caught.value.reports[0])
    assert time.monotonic() - started_s < 10
