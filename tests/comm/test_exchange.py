"""Sums over real ranks in the order of the tree, by both ways of exchanging."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import exchange, meeting, segment
from paceline.comm.exchange import Exchange, MessageExchange
from paceline.comm.shared_memory import _SMALL_BYTES as SHARED_SMALL_BYTES
from paceline.comm.shared_memory import SharedMemoryExchange
from paceline.comm.tree import TreeSum, plan_reduction
from paceline.plan import calls
from tests.dist.pool import Pool, RankError

KINDS = {"messages": MessageExchange, "shared": SharedMemoryExchange}


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


def sum_on_ranks(exchange: Exchange, shares: tuple[int, ...], leaves: list[Tensor]) -> Tensor:
    plan, rank = plan_reduction(shares), dist.get_rank()
    first = sum(shares[:rank])
    tree: TreeSum[Tensor] = TreeSum(len(leaves), torch.add)
    for leaf in range(first, first + shares[rank]):
        tree.push((leaf, leaf + 1), leaves[leaf])
    total = torch.full_like(leaves[0], torch.nan)
    subtrees = [list(value.split(max(1, len(value) // 3))) for _, value in tree.subtrees]
    if subtrees:  # as a bucket does: the last subtree is where the sum goes
        total.copy_(tree.subtrees[-1][1])
        subtrees[-1] = [total]
    exchange.sum_subtrees(subtrees, plan, total)
    return total


def exchange_many(world: Any, kind: str, cases: list[tuple[tuple[int, ...], int, str]]) -> int:
    exchange, chance = KINDS[kind](dist.group.WORLD), random.Random(world.rank)
    num_wrong = 0
    for seed, (shares, length, dtype) in enumerate(cases):
        leaves = draw_leaves(sum(shares), length, getattr(torch, dtype), seed)
        time.sleep(chance.uniform(0, 0.004))
        total = sum_on_ranks(exchange, shares, leaves)
        num_wrong += not torch.equal(total, sum_alone(leaves))
    assert kind == "messages" or exchange._otherwise is None  # type: ignore[attr-defined]
    return num_wrong


def list_cases(num_ranks: int) -> list[tuple[tuple[int, ...], int, str]]:
    chance = random.Random(num_ranks)
    cases = []
    for _ in range(40):
        shares = tuple(chance.choice([0, 1, 1, 2, 3, 4, 5, 8]) for _ in range(num_ranks))
        length = chance.choice([1, 2, 3, 7, 64, 1000, 65_537, 140_001])
        if any(shares):
            cases.append((shares, length, chance.choice(["float32", "float64"])))
    return cases


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_sums_are_those_of_one_process(ranks: Pool, kind: str, nproc: int) -> None:
    assert ranks.run(exchange_many, nproc, (kind, list_cases(nproc))) == [0] * nproc


def count_bytes(world: Any, kind: str, shares: tuple[int, ...], length: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "_FUTEX_CALLS", {})  # so that every meeting is a collective
        exchange = KINDS[kind](dist.group.WORLD)
        sum_on_ranks(exchange, shares, draw_leaves(sum(shares), length, torch.float32, 0))
        return exchange.sent_bytes


@pytest.mark.parametrize(
    ("shares", "subtrees"), [((1, 1, 1, 1), 1), ((2, 2, 2, 2), 1), ((3, 3, 3, 3), 2), ((5, 5, 3, 3), 3)]
)
def test_bytes_are_a_rings_where_each_rank_owns_one_node(
    ranks: Pool, shares: tuple[int, ...], subtrees: int
) -> None:
    ring = 2 * 3 / 4 * 4000 * 4
    sent = ranks.run(count_bytes, 4, ("messages", shares, 4000))
    assert max(sent) == ring * (subtrees + 1) / 2
    # A meeting by messages is a byte per peer. A small vector takes one, a large one two.
    assert ranks.run(count_bytes, 4, ("shared", shares, 4000)) == [3] * 4
    assert ranks.run(count_bytes, 4, ("shared", shares, 150_000)) == [6] * 4


def exchange_without_memory(world: Any, missing_on: int) -> tuple[bool, int]:
    original = segment._map_segment
    if world.rank == missing_on:
        segment._map_segment = lambda path, token, num_bytes: None
    try:
        exchange = SharedMemoryExchange(dist.group.WORLD)  # type: ignore[arg-type]
        leaves = draw_leaves(4, 1001, torch.float32, 0)
        totals = [sum_on_ranks(exchange, (2, 1, 1), leaves) for _ in range(3)]
    finally:
        segment._map_segment = original
    is_right = all(torch.equal(total, sum_alone(leaves)) for total in totals)
    return is_right and exchange._otherwise is not None, exchange.sent_bytes


@pytest.mark.parametrize("missing_on", [0, 2])
def test_one_rank_without_shared_memory_moves_all_to_messages(ranks: Pool, missing_on: int) -> None:
    results = ranks.run(exchange_without_memory, 3, (missing_on,))
    assert [is_right for is_right, _ in results] == [True] * 3
    assert all(num_bytes > 0 for _, num_bytes in results), "what was sent in messages counts"


def exchange_without_memfd(world: Any) -> tuple[bool, bool]:
    create = os.memfd_create
    del os.memfd_create  # as in Python on an old C library
    try:
        exchange = SharedMemoryExchange(dist.group.WORLD)  # type: ignore[arg-type]
        leaves = draw_leaves(2, 1001, torch.float32, 0)
        total = sum_on_ranks(exchange, (1, 1), leaves)
    finally:
        os.memfd_create = create
    return torch.equal(total, sum_alone(leaves)), exchange._otherwise is not None


def test_a_system_without_memfd_create_sends_messages(ranks: Pool) -> None:
    assert ranks.run(exchange_without_memfd) == [(True, True)] * 2


def hold_and_count(world: Any) -> tuple[list[int], int]:
    """Sizes of the segment as vectors grow and shrink, and what is left open when nobody uses it."""
    before = count_segments()  # of who trained in this process before
    exchange = SharedMemoryExchange(dist.group.WORLD)  # type: ignore[arg-type]
    sizes = []
    for length in (10, 400_000, 10, 300_000, 800_000):
        leaves = draw_leaves(2, length, torch.float32, length)
        assert torch.equal(sum_on_ranks(exchange, (1, 1), leaves), sum_alone(leaves))
        assert exchange._memory is not None
        sizes.append(len(exchange._memory))
    assert count_segments() == before + 3, "the memory, the page where ranks meet, and its file"
    del exchange
    return sizes, count_segments() - before


def count_segments() -> int:
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    return sum("memfd:paceline" in link for link in links)


def test_the_segment_grows_and_leaves_nothing(ranks: Pool) -> None:
    for sizes, still_open in ranks.run(hold_and_count):
        assert sizes == sorted(sizes)
        assert len(set(sizes)) == 3
        assert sizes[-1] < 3 * (800_000 * 4 + 64) + 2 * SHARED_SMALL_BYTES
        assert still_open == 0


def die_before_the_second_meeting(world: Any) -> None:
    exchange = SharedMemoryExchange(dist.group.WORLD)  # type: ignore[arg-type]
    leaves = draw_leaves(2, 100, torch.float32, 0)
    sum_on_ranks(exchange, (1, 1), leaves)
    if world.rank == 1:
        os.kill(os.getpid(), 9)
    sum_on_ranks(exchange, (1, 1), leaves)


def test_a_dead_rank_is_an_error_and_no_hang(ranks: Pool) -> None:
    started_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(die_before_the_second_meeting)
    assert caught.value.exit_codes == {1: -9}
    assert re.search("Connection (closed|reset) by peer", caught.value.reports[0])
    assert time.monotonic() - started_s < 10


def test_plans_count_the_vectors_that_travel_whole() -> None:
    assert calls.WHOLE_BYTES == exchange.WHOLE_BYTES
