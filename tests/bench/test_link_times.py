"""Measured links: on real ranks, and slow ones among made-up ones."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paceline.bench import link_times as links_module
from paceline.bench.common_clock import CommonClock
from paceline.bench.link_times import PAIR_SIZES, find_slow_links, list_pairs, measure_links
from paceline.bench.links import MeasuredLinks
from paceline.comm import nodes as nodes_module
from paceline.errors import PacelineError
from paceline.world import World
from tests.bench.measured_links import make_links
from tests.dist.pool import Pool


def measure(world: World) -> MeasuredLinks:
    return measure_links(world)


def test_links_of_one_machine(ranks: Pool) -> None:
    found, other = ranks.run(measure, nproc=2)
    assert found == other
    assert found.nodes == (0, 0)
    assert len(found.hosts) == 1
    assert [(pair.first, pair.second) for pair in found.pairs] == [(0, 1)]
    link = found.links.same_node
    assert found.links.between_nodes is None
    assert link is not None
    for curve in (link.message, link.exchange, link.stream):
        assert list(curve.seconds) == sorted(curve.seconds)
        assert curve.num_bytes[: len(PAIR_SIZES)] == PAIR_SIZES
        assert 1e-7 < curve(64) < 0.2
        assert 1e6 < 1 / curve.s_per_byte < 1e12
    assert 1e-6 < found.links.call_s < 0.2
    assert 0 < found.took_s < 60


def time_naps(world: World) -> list[float]:
    clock = CommonClock(world)
    return [clock.time(lambda: time.sleep(0.05 * world.rank)) for _ in range(3)]


def test_a_call_lasts_until_the_last_rank_ends(ranks: Pool) -> None:
    first, second, third = ranks.run(time_naps, nproc=3)
    assert first == second == third
    assert all(0.1 <= took_s < 5 for took_s in first)


def test_one_rank_has_no_links(ranks: Pool) -> None:
    assert ranks.run(refuse_one, nproc=1) == ["PL622"]


def refuse_one(world: World) -> str:
    with pytest.raises(PacelineError) as caught:
        measure_links(world)
    return caught.value.code


def test_a_rank_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out() -> Any:
        raise RuntimeError("Timed out waiting 600000ms for recv operation to complete")

    monkeypatch.setattr(links_module, "find_nodes", time_out)

    class Two:
        rank, world_size, timeout_s = 1, 2, 600.0

    with pytest.raises(PacelineError, match=r"rank 1 got no answer .*Timed out waiting 600000ms.*PL954"):
        measure_links(Two())  # type: ignore[arg-type]


def test_all_pairs_of_few_ranks_and_the_first_ranks_of_many() -> None:
    assert len(list_pairs(range(8))) == 28
    assert list_pairs((0, 0, 0)) == [(0, 1), (0, 2), (1, 2)]
    many = list_pairs([rank // 4 for rank in range(16)])
    assert len(many) == 6 + 4 * 3
    assert (0, 4) in many
    assert (4, 7) in many
    assert (1, 5) not in many


def test_a_slow_pair_is_named() -> None:
    (link,) = find_slow_links(make_links((0, 1, 2, 3), slow={(1, 2): 5.0}))
    assert (link.ranks, link.node, link.by_latency) == ((1, 2), None, False)
    assert link.times == pytest.approx(5)


def test_a_slow_node_is_named_once() -> None:
    slow = {(0, 2): 5.0, (1, 2): 5.0, (2, 3): 5.0}
    (link,) = find_slow_links(make_links((0, 1, 2, 3), slow=slow))
    assert (link.ranks, link.node) == ((2,), 2)
    assert link.times == pytest.approx(5)
    slow = dict.fromkeys([(0, 4), (0, 5), (1, 4), (1, 5), (2, 4), (2, 5), (3, 4), (3, 5)], 3.0)
    (link,) = find_slow_links(make_links((0, 0, 1, 1, 2, 2), slow=slow))
    assert (link.ranks, link.node) == ((4, 5), 2)


def test_a_late_pair_is_named_after_the_slow_node() -> None:
    slow = {(0, 2): 5.0, (1, 2): 5.0, (2, 3): 5.0}
    node, pair = find_slow_links(make_links((0, 1, 2, 3), slow=slow, late={(0, 2): 9.0, (0, 1): 3.0}))
    assert (node.node, node.by_latency) == (2, False)
    assert (pair.ranks, pair.by_latency) == ((0, 1), True)
    assert pair.times == pytest.approx(3)


def test_equal_links_and_too_few_pairs_are_not_slow() -> None:
    assert find_slow_links(make_links((0, 0, 1, 1))) == []
    assert find_slow_links(make_links((0, 0, 0), slow={(0, 1): 1.5})) == []
    assert find_slow_links(make_links((0, 0, 0), late={(0, 1): 5.0})) == [], "not 1 ms longer"
    assert find_slow_links(make_links((0, 1), slow={(0, 1): 9.0})) == [], "nothing to compare with"


def test_a_stream_slower_than_an_exchange_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    answers = iter([0.2, 0.027, 0.3, 0.3])

    def measure(ring: list[int], size: int, *, in_flight: int) -> float:
        assert in_flight == 2
        asked.append(size)
        return next(answers)

    monkeypatch.setattr(links_module, "_measure_ring", measure)
    found = links_module._look_again([0, 1], [0.026, 0.104, 0.06, 0.5], [0.052, 0.052, 0.058, 0.058])
    assert asked == [4096, 4096, 1 << 18, 1 << 18], "twice at most, and only what is implausible"
    assert found == [0.026, 0.027, 0.06, 0.3]


def test_a_link_that_takes_no_measurable_time_is_compared_too() -> None:
    curve = links_module._curve([0.0] * len(links_module.PAIR_SIZES))
    assert min(curve.seconds) > 0
    pairs = [links_module.Pair(0, peer, curve, links_module._TICK_S) for peer in (1, 2, 3)]
    assert links_module._compare_pairs(pairs) == []


def test_large_messages_come_first_because_windows_must_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ping(peer: int, size: int, *, begins: bool) -> tuple[float, float]:
        asked.append(size)
        return 0.025 + size * 80e-9, 0.025

    monkeypatch.setattr(links_module, "_ping", ping)
    monkeypatch.setattr(links_module.dist, "all_reduce", lambda row: None)
    pair = links_module._measure_pair((0, 1), 0)
    assert asked == sorted(links_module.PAIR_SIZES, reverse=True)
    assert [pair.message(size) for size in links_module.PAIR_SIZES] == pytest.approx(
        [0.025 + size * 80e-9 for size in links_module.PAIR_SIZES]
    )


@pytest.mark.parametrize(
    ("taken", "sent"),
    [
        ([0.4, 0.25, 0.15, 0.13, 0.13, 0.1], 5),  # grows by the fourth
        ([0.1] * 9, 4),  # at once
        ([1.0 / n for n in range(1, 20)], 10),  # never
    ],
)
def test_windows_grow_until_messages_are_hardly_faster(
    monkeypatch: pytest.MonkeyPatch, taken: list[float], sent: int
) -> None:
    left = iter(taken)
    monkeypatch.setattr(links_module, "_time", lambda send: next(left))
    monkeypatch.setattr(links_module, "_agree", lambda seconds: seconds)
    links_module._grow_windows(lambda: None)
    assert len(list(left)) == len(taken) - sent


def find_claimed_nodes(
    world: Any, claims: list[tuple[str, str, int]]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    original = nodes_module._identify_node
    nodes_module._identify_node = lambda: claims[world.rank]
    try:
        return nodes_module.find_nodes()
    finally:
        nodes_module._identify_node = original


def test_nodes_of_one_name_are_two_if_their_boots_or_networks_differ(ranks: Pool) -> None:
    for other, nodes in ((("a", "boot", 1), (0, 0)), (("a", "later", 1), (0, 1)), (("a", "boot", 2), (0, 1))):
        found = ranks.run(find_claimed_nodes, args=([("a", "boot", 1), other],))
        assert [numbers for _, numbers in found] == [nodes, nodes]
