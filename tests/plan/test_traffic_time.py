"""Seconds of a step's collectives: calls against their messages, and rows against hand computation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.comm.tree import plan_reduction, split_block
from paceline.data.share import count_owned, owned_microbatches
from paceline.errors import PacelineError
from paceline.plan.calls import (
    StepCall,
    all_gather,
    all_reduce,
    list_call_groups,
    list_call_phases,
    time_call,
)
from paceline.plan.exact_sums import count_subtrees, list_exact_phases, predict_exact_sum
from paceline.plan.links import Curve, Link, Links
from paceline.plan.links_file import MeasuredLinks
from paceline.plan.traffic_table import list_blocks, plan_recipe_traffic
from paceline.plan.traffic_time import TimedTraffic, time_recipe_traffic
from paceline.recipe import Layout, Recipe, load_recipe, settle_recipe
from tests.comm.measured import make_links

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt-stdlib.toml"
# Without latency, 1 GB/s within a node and 10 MB/s between nodes.
PLAIN = Links(Link.of(0.0, 1e9), Link.of(0.0, 1e7))
FP32 = "train.dtype=fp32"
FAST = "train.reduction=fast"
CALLS = [
    StepCall(operation, algorithm, 1e6, "dp", 4, 3)
    for operation, algorithm in (
        ("all_reduce", "ring"),
        ("all_gather", "ring"),
        ("reduce_scatter", "direct"),
        ("all_to_all", "direct"),
        ("shift", "ring"),
        ("exact_sum", "direct"),
    )
]
CALLS += [replace(CALLS[-1], num_subtrees=3), replace(CALLS[-1], num_bytes=8192.0, num_subtrees=2)]


def settle(*settings: str, nproc: int = 4) -> tuple[Recipe, Layout]:
    settled = settle_recipe(load_recipe(RECIPE, [FP32, *settings]), nproc)
    return settled.recipe, settled.layout


def time_rows(found: MeasuredLinks, *settings: str) -> dict[str, TimedTraffic]:
    recipe, layout = settle(*settings, nproc=len(found.nodes))
    rows = plan_recipe_traffic(recipe, layout)
    return {each.traffic.axis: each for each in time_recipe_traffic(rows, recipe, layout, found)}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.operation}-{call.num_subtrees}")
def test_bytes_of_a_call_are_those_of_its_messages(call: StepCall) -> None:
    phases = list_call_phases(call, (0, 1, 2, 3))
    assert phases is not None
    for rank in range(call.num_ranks):
        sent = sum(
            phase.num_rounds * phase.num_bytes
            for phase in phases
            for sender, _ in phase.edges
            if sender == rank
        )
        assert call.times * sent == pytest.approx(call.sent_bytes)


def test_groups_share_the_connection_of_a_node() -> None:
    """A ring of two ranks sends a vector once; two such rings over one link take twice as long."""
    nodes, layout = (0, 0, 1, 1), Layout(2, 1, 2)
    over_dp, over_tp = (list_call_groups(layout, axis) for axis in ("dp_replicate", "tp"))
    assert (over_dp, over_tp) == ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    across, inside = all_reduce(1e6, "dp_replicate", 2), all_reduce(1e6, "tp", 2)
    assert time_call(across, over_dp[:1], nodes, PLAIN) == pytest.approx(0.1)
    assert time_call(across, over_dp, nodes, PLAIN) == pytest.approx(0.2)
    assert time_call(inside, over_tp, nodes, PLAIN) == pytest.approx(0.001), "no connection is shared"
    # Placed round-robin, tp crosses and dp_replicate stays.
    assert time_call(inside, over_tp, (0, 1, 0, 1), PLAIN) == pytest.approx(0.2)
    # One of two groups crosses: the slower class counts.
    assert time_call(inside, over_tp, (0, 0, 0, 1), PLAIN) == pytest.approx(0.1)


def test_a_shift_takes_a_turn_per_other_rank() -> None:
    shift = StepCall("shift", "ring", 3e6, "cp", 3)
    assert time_call(shift, [[0, 1, 2]], (0, 1, 2), PLAIN) == pytest.approx(2 * 1e6 / 1e7)


def test_groups_whose_messages_differ_are_not_timed() -> None:
    call = StepCall("exact_sum", "by-node", 1e6, "dp", 3)
    assert time_call(call, [[0, 1, 2]], (0, 0, 1), PLAIN) is not None
    assert time_call(call, [[0, 1, 2], [3, 4, 5]], (0, 0, 1, 2, 3, 4), PLAIN) is None
    # The second group has its two ranks of a node elsewhere, and so other slices.
    assert (
        time_call(
            replace(call, num_ranks=4), [[0, 1, 2, 3], [4, 5, 6, 7]], (*(0, 0, 1, 1), *(2, 2, 2, 3)), PLAIN
        )
        is None
    )


def test_subtrees_are_those_of_the_tree() -> None:
    for num_leaves in range(1, 20):
        for start in range(num_leaves):
            for stop in range(start, num_leaves + 1):
                assert count_subtrees(start, stop, num_leaves) == len(split_block(start, stop, num_leaves))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_blocks_are_those_that_ranks_compute(num_ranks: int) -> None:
    recipe, layout = settle("train.global_batch_size=27", nproc=num_ranks)
    blocks = list_blocks(recipe, layout)
    assert blocks == [
        (own.start, own.stop) for own in (owned_microbatches(7, num_ranks, rank) for rank in range(num_ranks))
    ]
    subtrees = plan_reduction(count_owned(7, num_ranks)).subtrees
    assert [count_subtrees(*block, 7) for block in blocks] == list(map(len, subtrees))


def test_a_row_adds_up_its_calls() -> None:
    found = replace(make_links((0, 0, 1, 1)), links=PLAIN)
    times = time_rows(found, "layout.dp_replicate=2", "layout.tp=2", FAST)
    recipe, layout = settle("layout.dp_replicate=2", "layout.tp=2", FAST)
    by_axis = {row.axis: row for row in plan_recipe_traffic(recipe, layout)}
    # Over two ranks a ring sends the vector once, and two of them share the link between the nodes.
    assert by_axis["dp_replicate"].num_bytes is not None
    assert times["dp_replicate"].time_s == pytest.approx(2 * by_axis["dp_replicate"].num_bytes / 1e7)
    assert by_axis["tp"].num_bytes is not None
    assert times["tp"].time_s == pytest.approx(by_axis["tp"].num_bytes / 1e9)
    assert times["tp"].traffic == by_axis["tp"]


def test_every_call_pays_its_own_latency() -> None:
    found = make_links((0, 0))
    recipe, layout = settle("layout.tp=2", nproc=2)
    [row] = plan_recipe_traffic(recipe, layout)
    free, paid = (
        time_recipe_traffic([row], recipe, layout, replace(found, links=replace(found.links, call_s=call_s)))
        for call_s in (0.0, 1.0)
    )
    assert free[0].time_s is not None
    assert paid[0].time_s == pytest.approx(free[0].time_s + sum(call.times for call in row.calls))


def test_exact_sums_take_the_algorithm_of_their_ranks() -> None:
    layout = "layout.dp_replicate=4"
    messages = time_rows(make_links((0, 1, 2, 3)), layout)["dp_replicate"]
    shared = time_rows(make_links((0, 0, 0, 0)), layout)["dp_replicate"]
    by_node = time_rows(make_links((0, 0, 1, 1)), layout)["dp_replicate"]
    named = time_rows(make_links((0, 0, 1, 1)), layout, "algorithm.exact_sum=direct")["dp_replicate"]
    found = [messages, shared, by_node, named]
    assert [each.traffic.calls[0].algorithm for each in found] == [
        "direct",
        "shared-memory",
        "by-node",
        "direct",
    ]
    [size] = {call.num_bytes for each in found for call in each.traffic.calls}
    # Of two sums of chunks, three quarters leave the rank; by node, half of it leaves each of two ranks.
    assert [each.traffic.num_bytes for each in found] == pytest.approx([1.5 * size, 0, size / 2, 1.5 * size])
    assert None not in [each.time_s for each in found]
    assert named.time_s is not None
    assert by_node.time_s is not None
    assert by_node.time_s < named.time_s, "it sends less between the nodes"
    unfit = time_rows(make_links((0, 1, 2, 3)), layout, "algorithm.exact_sum=by-node")["dp_replicate"]
    assert unfit.time_s is None
    assert "by-node does not suit" in unfit.reason


def test_exact_sums_with_links_take_the_fastest(tmp_path: Path) -> None:
    slow = replace(make_links((0, 0)), links=replace(make_links((0, 0)).links, copy=Curve.line(0.0, 1.0)))
    layout = "layout.dp_replicate=2"
    names = [
        time_rows(slow, layout, *more)["dp_replicate"].traffic.calls[0].algorithm
        for more in ((), ("algorithm.links=links.json",))
    ]
    assert names == ["shared-memory", "direct"]


def test_uneven_shares_send_more_sums() -> None:
    """Of 6 microbatches two ranks have 3 each, which are two subtrees."""
    even, uneven = (
        time_rows(make_links((0, 1)), f"train.global_batch_size={size}")["dp_replicate"] for size in (32, 24)
    )
    assert [each.traffic.calls[0].num_subtrees for each in (even, uneven)] == [1, 2]
    assert even.time_s is not None
    assert uneven.time_s is not None
    assert 1.3 < uneven.time_s / even.time_s < 1.6, "three messages in place of two"
    by_node = time_rows(make_links((0, 0, 1, 1)), "train.global_batch_size=20")["dp_replicate"]
    assert by_node.time_s is None
    assert "one subtree" in by_node.reason


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        (("layout.dp_shard=4",), "exact sums of shards"),
        (("layout.dp_replicate=4", FAST, "ddp.find_unused_parameters=true"), "find_unused_parameters"),
        (("layout.dp_replicate=2", "layout.pp=2"), "where pp cuts it"),
    ],
)
def test_what_is_not_modelled_names_the_reason(settings: tuple[str, ...], seen: str) -> None:
    for each in time_rows(make_links((0, 0, 1, 1)), *settings).values():
        assert each.time_s is None
        assert seen in each.reason


def test_links_of_another_number_of_ranks_are_refused() -> None:
    recipe, layout = settle("layout.dp_replicate=2", nproc=2)
    for nodes in ((0, 0, 1, 1), (0, 1, 2)):
        with pytest.raises(PacelineError) as caught:
            time_recipe_traffic(plan_recipe_traffic(recipe, layout), recipe, layout, make_links(nodes))
        assert caught.value.code == "PL925"
        assert f"{len(nodes)} ranks on {max(nodes) + 1} nodes" in caught.value.saw
        assert f"--nproc {len(nodes)}" in caught.value.fix


def test_all_gathers_copy_their_result() -> None:
    links = replace(PLAIN, copy=Curve.line(0.0, 1e-6))
    found = [time_call(all_gather(1e6, "dp_shard", 2), [[0, 1]], (0, 0), each) for each in (PLAIN, links)]
    assert found[0] is not None
    assert found[1] == pytest.approx(found[0] + 1.0)


def test_a_sum_in_shared_memory_meets_once_or_twice() -> None:
    machines = (0, 0)
    unknown = Links(Link.of(1e-3, 1e9), None, call_s=0.25)
    known = replace(unknown, meet_s=0.5)
    times = [
        [predict_exact_sum("shared-memory", [size], machines, machines, links) for size in (4096, 4 << 20)]
        for links in (known, unknown)
    ]
    assert times[0] == pytest.approx([0.5, 1.0])
    # Else it counts as a collective of a byte per pair: its own cost, and one exchange of 2 ms per meeting.
    assert times[1] == pytest.approx([0.252, 0.254])


def test_by_node_sends_a_slice_per_rank() -> None:
    """The bytes of a row are those of the twins' messages, without the meetings in a node."""
    phases = list_exact_phases("by-node", 4e6, (0, 0, 1, 1))
    crossing = [p.num_rounds * p.num_bytes for p in phases if any(edge == (0, 2) for edge in p.edges)]
    assert sum(crossing) == pytest.approx(2e6)
