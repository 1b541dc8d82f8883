"""Sums over ranks on several nodes, in the order of the tree. The nodes are claimed, not real.

Ranks of different claimed nodes exchange messages only, as real ones do.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm import by_node, segment
from paceline.comm.by_node import NodeExchange
from paceline.comm.exchange import MessageExchange
from paceline.comm.shared_memory import SharedMemoryExchange
from tests.comm.test_exchange import draw_leaves, sum_alone, sum_on_ranks
from tests.dist.pool import Pool, RankError
from tests.parallel.test_exact import train_deep

# Each rank's node.
PLACEMENTS = {
    "two nodes of two": (0, 0, 1, 1),
    "round-robin": (0, 1, 0, 1),
    "two and one": (0, 0, 1),
    "one and three": (0, 1, 1, 1),
    "three nodes": (0, 0, 1, 2, 2),
    "mixed": (0, 1, 1, 0, 2),
}
# Small blocks, so that vectors of a few KiB consist of many.
BLOCK_BYTES = 1024


@contextmanager
def claim_node(node: int) -> Iterator[None]:
    original, least, small = segment._identify_machine, by_node._LEAST_BLOCK_BYTES, by_node._SMALL_BYTES
    segment._identify_machine = lambda: ("host", "boot", node)
    by_node._LEAST_BLOCK_BYTES, by_node._SMALL_BYTES = BLOCK_BYTES, 256
    try:
        yield
    finally:
        segment._identify_machine = original
        by_node._LEAST_BLOCK_BYTES, by_node._SMALL_BYTES = least, small


def list_cases(num_ranks: int) -> list[tuple[tuple[int, ...], int, str]]:
    chance = random.Random(num_ranks)
    cases = [((1,) * num_ranks, 5000, "float32")]
    for _ in range(25):
        shares = tuple(chance.choice([0, 1, 1, 2, 3, 4, 5, 8]) for _ in range(num_ranks))
        length = chance.choice([1, 2, 3, 7, 64, 1000, 4099, 20_001])
        if any(shares):
            cases.append((shares, length, chance.choice(["float32", "float64", "bfloat16"])))
    return cases


def exchange_many(world: Any, nodes: tuple[int, ...], cases: list[tuple[tuple[int, ...], int, str]]) -> int:
    chance, num_wrong = random.Random(world.rank), 0
    with claim_node(nodes[world.rank]):
        exchange = SharedMemoryExchange(dist.group.WORLD)  # type: ignore[arg-type]
        for seed, (shares, length, dtype) in enumerate(cases):
            leaves = draw_leaves(sum(shares), length, getattr(torch, dtype), seed)
            time.sleep(chance.uniform(0, 0.004))
            total = sum_on_ranks(exchange, shares, leaves)
            num_wrong += not torch.equal(total, sum_alone(leaves))
    assert isinstance(exchange._otherwise, NodeExchange)
    assert exchange._otherwise._otherwise is None, "no memory was shared inside the nodes"
    return num_wrong


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_sums_are_those_of_one_process(ranks: Pool, placement: str) -> None:
    nodes = PLACEMENTS[placement]
    assert ranks.run(exchange_many, len(nodes), (nodes, list_cases(len(nodes)))) == [0] * len(nodes)


def count_bytes(world: Any, nodes: tuple[int, ...], shares: tuple[int, ...], length: int) -> int:
    """Return the bytes that this rank sent to other nodes."""
    sent = [0]
    original = dist.isend

    def send(tensor: Any, *, group: Any, group_dst: int) -> Any:
        if nodes[group_dst] != nodes[world.rank]:
            sent[0] += tensor.numel() * tensor.element_size()
        return original(tensor, group=group, group_dst=group_dst)

    dist.isend = send  # type: ignore[assignment]
    try:
        with claim_node(nodes[world.rank]):
            exchange = SharedMemoryExchange(dist.group.WORLD)  # type: ignore[arg-type]
            sum_on_ranks(exchange, shares, draw_leaves(sum(shares), length, torch.float32, 0))
    finally:
        dist.isend = original
    return sent[0]


@pytest.mark.parametrize(
    ("placement", "shares", "times"),
    [
        ("two nodes of two", (1, 1, 1, 1), 1.0),
        ("two nodes of two", (4, 4, 4, 4), 1.0),
        ("round-robin", (1, 1, 1, 1), 1.5),
        ("three nodes", (4, 4, 8, 4, 4), 4 / 3),
    ],
)
def test_a_vector_leaves_a_node_about_once(
    ranks: Pool, placement: str, shares: tuple[int, ...], times: float
) -> None:
    nodes, length = PLACEMENTS[placement], 12_000
    sent = ranks.run(count_bytes, len(nodes), (nodes, shares, length))
    for node in set(nodes):
        leaving = sum(count for count, at in zip(sent, nodes, strict=True) if at == node)
        assert leaving == pytest.approx(times * length * 4, rel=0.01)


def exchange_alone_on_nodes(world: Any) -> bool:
    leaves = draw_leaves(3, 5000, torch.float32, 0)
    with claim_node(world.rank):
        exchange = SharedMemoryExchange(dist.group.WORLD)  # type: ignore[arg-type]
        total = sum_on_ranks(exchange, (1, 1, 1), leaves)
    return torch.equal(total, sum_alone(leaves)) and isinstance(exchange._otherwise, MessageExchange)


def test_nodes_of_one_rank_send_messages(ranks: Pool) -> None:
    assert ranks.run(exchange_alone_on_nodes, 3) == [True] * 3


def exchange_without_memory(world: Any, nodes: tuple[int, ...]) -> bool:
    original = segment._map_segment
    if world.rank == 3:
        segment._map_segment = lambda path, token, num_bytes: None
    leaves = draw_leaves(4, 5000, torch.float32, 0)
    try:
        with claim_node(nodes[world.rank]):
            exchange = SharedMemoryExchange(dist.group.WORLD)  # type: ignore[arg-type]
            totals = [sum_on_ranks(exchange, (1, 1, 1, 1), leaves) for _ in range(3)]
    finally:
        segment._map_segment = original
    assert isinstance(exchange._otherwise, NodeExchange)
    assert isinstance(exchange._otherwise._otherwise, MessageExchange)
    return all(torch.equal(total, sum_alone(leaves)) for total in totals)


def test_ranks_that_only_believe_to_share_a_node_send_messages(ranks: Pool) -> None:
    assert ranks.run(exchange_without_memory, 4, ((0, 0, 1, 1),)) == [True] * 4


def die_between_blocks(world: Any, nodes: tuple[int, ...]) -> None:
    leaves = draw_leaves(4, 5000, torch.float32, 0)
    with claim_node(nodes[world.rank]):
        exchange = SharedMemoryExchange(dist.group.WORLD)  # type: ignore[arg-type]
        sum_on_ranks(exchange, (1, 1, 1, 1), leaves)
        add_arrived, turns = NodeExchange._add_arrived, iter(range(100))

        def add_or_die(self: NodeExchange, *args: Any, **kwargs: Any) -> None:
            if world.rank == 3 and next(turns) == 5:
                os.kill(os.getpid(), 9)
            add_arrived(self, *args, **kwargs)

        NodeExchange._add_arrived = add_or_die  # type: ignore[method-assign]
        try:
            sum_on_ranks(exchange, (1, 1, 1, 1), leaves)
        finally:
            NodeExchange._add_arrived = add_arrived  # type: ignore[method-assign]


def test_a_dead_rank_is_an_error_on_its_node_and_its_twin(ranks: Pool) -> None:
    started_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(die_between_blocks, 4, ((0, 0, 1, 1),))
    assert caught.value.exit_codes == {3: -9}
    for rank in (1, 2):
        assert re.search("Connection (closed|reset) by peer", caught.value.reports[rank])
    assert time.monotonic() - started_s < 20


def train_on_nodes(world: Any, nodes: tuple[int, ...], num_steps: int) -> tuple[str, list[float]]:
    with claim_node(nodes[world.rank]):
        trained, _ = train_deep(world, num_steps, True, False)
    return trained.hash, trained.losses


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0), (0, 0, 1)])
def test_delayed_steps_have_the_bits_of_one_process(ranks: Pool, nodes: tuple[int, ...]) -> None:
    ((trained, _),) = ranks.run(train_deep, 1, (30, False, False), timeout_s=60)
    for found in ranks.run(train_on_nodes, len(nodes), (nodes, 30), timeout_s=100):
        assert found == (trained.hash, trained.losses)


def collect_warnings(world: Any, nodes: tuple[int, ...]) -> list[str]:
    handler = logging.handlers.BufferingHandler(100)
    by_node.log.addHandler(handler)
    leaves = draw_leaves(len(nodes), 10, torch.float32, 0)
    try:
        with claim_node(nodes[world.rank]):
            exchange = SharedMemoryExchange(dist.group.WORLD)  # type: ignore[arg-type]
            for _ in range(2):
                sum_on_ranks(exchange, (1,) * len(nodes), leaves)
    finally:
        by_node.log.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer if record.levelno >= logging.WARNING]


def test_ranks_that_are_placed_round_robin_are_warned_of_once(ranks: Pool) -> None:
    first, *others = ranks.run(collect_warnings, 3, ((0, 1, 0),))
    (message,) = first
    assert "their nodes are 0, 1, 0" in message
    assert message.endswith("[PL957]")
    assert others == [[], []]
    assert ranks.run(collect_warnings, 3, ((0, 0, 1),)) == [[], [], []]
