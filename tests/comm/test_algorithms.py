"""Algorithms change how numbers travel, by rule, by name or by predicted time, and no bit of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm import by_node
from paceline.comm.algorithms import Algorithms, RankLinks
from paceline.comm.buckets import broadcast_tensors
from paceline.plan.exact_sums import list_exact_phases, list_exact_sums, predict_exact_sum
from paceline.plan.links import Link, Links
from tests.comm.measured import make_links
from tests.comm.test_by_node import PLACEMENTS, claim_node
from tests.comm.test_exchange import draw_leaves, sum_alone, sum_on_ranks
from tests.dist.pool import Pool, RankError

LENGTHS = (3, 1000, 40_001, 600_000)


def sum_by(world: Any, nodes: tuple[int, ...], names: list[str]) -> dict[str, list[int]]:
    """Return the bytes that this rank sent by algorithm and length, after a check of the bits."""
    sent: dict[str, list[int]] = {}
    with claim_node(nodes[world.rank]):
        by_node._LEAST_BLOCK_BYTES, by_node._SMALL_BYTES = 512 << 10, 32 << 10  # restored on leaving
        for name in names:
            group = dist.group.WORLD
            assert group is not None
            exchange = Algorithms(exact_sum=name).build_exchange(group, torch.device("cpu"), [1])
            sent[name] = []
            for seed, length in enumerate(LENGTHS):
                leaves, before = draw_leaves(len(nodes), length, torch.float32, seed), exchange.sent_bytes
                total = sum_on_ranks(exchange, (1,) * len(nodes), leaves)
                assert torch.equal(total, sum_alone(leaves)), (name, length)
                sent[name].append(exchange.sent_bytes - before)
    return sent


@pytest.mark.parametrize(
    "nodes", [(0, 0, 0), PLACEMENTS["two nodes of two"], PLACEMENTS["three nodes"], PLACEMENTS["round-robin"]]
)
def test_the_bits_do_not_change_and_the_bytes_are_the_predicted_ones(
    ranks: Pool, nodes: tuple[int, ...]
) -> None:
    names = list_exact_sums(nodes)
    found = ranks.run(sum_by, len(nodes), (nodes, names))
    for name in names:
        for number, length in enumerate(LENGTHS):
            most = max(sent[name][number] for sent in found)
            planned = max(count_sent(name, 4 * length, nodes))
            assert most == pytest.approx(planned, rel=0.01, abs=200), (name, length)


def count_sent(name: str, num_bytes: int, machines: tuple[int, ...]) -> list[float]:
    sent = [0.0] * len(machines)
    for phase in list_exact_phases(name, num_bytes, machines):
        for sender, _ in () if phase.is_fill else phase.edges:
            sent[sender] += phase.num_rounds * phase.num_bytes
    return sent


def test_the_smallest_predicted_time_wins() -> None:
    nodes = (0, 0, 1, 1)
    slow, fast = make_links(nodes).links, Links(Link.of(1e-3, 1e9), Link.of(1e-6, 1e11))
    for links, sizes, best in ((slow, [25 << 20], "by-node"), (fast, [4096], "direct")):
        times = {name: predict_exact_sum(name, sizes, nodes, nodes, links) for name in ("by-node", "direct")}
        assert min(times, key=times.__getitem__) == best, times
    # Two containers of one host: two machines, and one node whose links were measured.
    assert predict_exact_sum("by-node", [4096], nodes, (0, 0, 0, 0), Links(Link.of(1e-3, 1e9), None)) > 0


def choose_by_links(world: Any, nodes: tuple[int, ...]) -> tuple[str, str, str, str]:
    algorithms = Algorithms(links=RankLinks(nodes, make_links(nodes).links))
    group = dist.group.WORLD
    assert group is not None
    with claim_node(nodes[world.rank]):
        exchange = algorithms.build_exchange(group, torch.device("cpu"), [25 << 20])
    return (
        type(exchange).__name__,
        algorithms.choose_agreement(1000, len(nodes)),
        algorithms.choose_agreement(100 << 20, len(nodes)),
        algorithms.choose_broadcast(100 << 20, on_cpu=True),
    )


def test_all_ranks_take_what_the_links_predict(ranks: Pool) -> None:
    expected = ("NodeExchange", "direct", "library", "pipeline")
    assert ranks.run(choose_by_links, 4, ((0, 0, 1, 1),)) == [expected] * 4


def build_unsuitable(world: Any, name: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    Algorithms(exact_sum=name).build_exchange(group, torch.device("cpu"), [1])


def test_an_algorithm_that_the_ranks_lack_is_refused(ranks: Pool) -> None:
    with pytest.raises(
        RankError, match=r"exact_sum=by-node for 2 ranks on 1 machines.*shared-memory or direct"
    ) as caught:
        ranks.run(build_unsuitable, 2, ("by-node",))
    assert re.search("PL968", str(caught.value))


def broadcast_both_ways(world: Any) -> bool:
    own = [
        torch.full((size,), world.rank + 1.0, dtype=dtype)
        for size, dtype in ((70_001, torch.float32), (3, torch.float64))
    ]
    broadcast_tensors(own, in_pipeline=True)
    return all(bool((tensor == 1.0).all()) for tensor in own)


def test_a_pipeline_gives_all_ranks_the_first_ones_tensors(ranks: Pool) -> None:
    assert ranks.run(broadcast_both_ways, 3) == [True] * 3
