"""Predicts the seconds that the collectives of a recipe's step take, axis by axis, from measured links.

The seconds are those of the calls one after the other, as if nothing overlapped: neither with computation nor
with calls over another axis. They hold for gloo on CPUs.

An exact sum takes the algorithm that `paceline train` takes: that of the recipe's `[algorithm]`, else the
first that suits the ranks, or with `algorithm.links` the fastest by prediction. A node of the file of links
counts as a machine, whose ranks can share memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import PacelineError
from paceline.plan.calls import StepCall, list_call_groups, time_call
from paceline.plan.exact_sums import (
    count_subtrees,
    list_exact_phases,
    list_exact_sums,
    predict_exact_sum,
)
from paceline.plan.links import Links
from paceline.plan.links_file import MeasuredLinks
from paceline.plan.traffic_table import AxisTraffic, count_microbatches, list_blocks
from paceline.recipe import Layout, Recipe

# How an exact sum travels, by algorithm.
_WAYS = {
    "direct": "by messages between all pairs of ranks",
    "shared-memory": "in shared memory",
    "by-node": "by node",
}


@dataclass(frozen=True)
class TimedTraffic:
    """A row of the traffic of a step, with the predicted seconds.

    Attributes:
        traffic: the row; of exact sums, with the algorithm that the ranks take and its bytes.
        time_s: of all calls of the row, one after the other; `None` if it is not predicted.
        reason: why it is not predicted; else empty.
    """

    traffic: AxisTraffic
    time_s: float | None
    reason: str = ""


def time_recipe_traffic(
    rows: Sequence[AxisTraffic], recipe: Recipe, layout: Layout, found: MeasuredLinks
) -> list[TimedTraffic]:
    """Return the rows with their seconds.

    Args:
        rows: of `plan_recipe_traffic`, for the same recipe and layout.
        recipe: what is trained.
        layout: resolved and legal.
        found: links between as many ranks as the layout has.

    Raises:
        PacelineError: PL925 if the links are those of more or fewer ranks.
    """
    there, here = len(found.nodes), layout.num_ranks
    if there != here:
        raise PacelineError(
            "PL925",
            saw=f"links between {there} ranks on {len(found.hosts)} node{'s' * (len(found.hosts) > 1)}, for "
            f"the {here} ranks of layout {layout}.",
            rule="The seconds depend on the node of every rank, so there must be as many ranks.",
            fix=f"Use a layout of {there} ranks (--nproc {there}), or measure with {here} ranks: "
            "paceline bench collectives --save-links FILE.",
        )
    return [_time_row(row, recipe, layout, found) for row in rows]


def _time_row(row: AxisTraffic, recipe: Recipe, layout: Layout, found: MeasuredLinks) -> TimedTraffic:
    if row.num_bytes is None:
        return TimedTraffic(row, None, row.what)
    if row.axis == "dp_replicate" and layout.dp_shard == 1:
        for key in ("find_unused_parameters", "broadcast_buffers"):
            if getattr(recipe.ddp, key):
                return TimedTraffic(row, None, f"predicted without ddp.{key}, which sends more")
    if any(call.operation == "exact_sum" for call in row.calls):
        placed = _place_exact_sums(row, recipe, layout, found)
        if isinstance(placed, str):
            return TimedTraffic(row, None, placed)
        row = placed
    total_s = 0.0
    # Blocks of a model are alike, and messages between all of many ranks take long to list.
    times: Counter[StepCall] = Counter()
    for call in row.calls:
        times[replace(call, times=1)] += call.times
    for call, count in times.items():
        call_s = time_call(call, list_call_groups(layout, call.over), found.nodes, found.links)
        if call_s is None:
            return TimedTraffic(row, None, "predicted where all groups of the axis lie on nodes alike")
        total_s += count * call_s
    return TimedTraffic(row, total_s)


def _place_exact_sums(
    row: AxisTraffic, recipe: Recipe, layout: Layout, found: MeasuredLinks
) -> AxisTraffic | str:
    """Return a row of exact sums by the algorithm that the ranks take, or why none is predicted."""
    machines = [found.nodes[rank] for rank in list_call_groups(layout, "dp")[0]]
    name = _choose_exact_sum(recipe, [int(call.num_bytes) for call in row.calls], machines, found.links)
    if name not in list_exact_sums(machines):
        return f"algorithm.exact_sum={name} does not suit ranks on these nodes"
    blocks, num_leaves = list_blocks(recipe, layout), count_microbatches(recipe)
    if name == "by-node" and not _has_one_sum_per_node(blocks, machines, num_leaves):
        return "predicted by node where each node has one subtree of the microbatches"
    most = max(count_subtrees(*block, num_leaves) for block in blocks)
    num_bytes = row.num_bytes
    if name != "direct":
        num_bytes = sum(_count_crossing(call.num_bytes, name, machines) for call in row.calls)
    return replace(
        row,
        num_bytes=num_bytes,
        what=f"gradients, once per step; {_WAYS[name]}",
        calls=tuple(replace(call, algorithm=name, num_subtrees=most) for call in row.calls),
    )


def _count_crossing(num_bytes: float, algorithm: str, machines: Sequence[int]) -> float:
    """Return the bytes of an exact sum that rank 0 sends to other machines; in its own it shares memory."""
    phases = list_exact_phases(algorithm, num_bytes, machines)
    return sum(
        phase.num_rounds * phase.num_bytes
        for phase in phases
        for sender, receiver in (() if phase.is_fill else phase.edges)
        if sender == 0 and machines[receiver] != machines[0]
    )


def _choose_exact_sum(recipe: Recipe, sizes: Sequence[int], machines: Sequence[int], links: Links) -> str:
    names = list_exact_sums(machines)
    if recipe.algorithm.exact_sum != "auto":
        return recipe.algorithm.exact_sum
    if recipe.algorithm.links is None:
        return names[0]
    return min(names, key=lambda name: predict_exact_sum(name, sizes, machines, machines, links))


def _has_one_sum_per_node(
    blocks: Sequence[tuple[int, int]], machines: Sequence[int], num_leaves: int
) -> bool:
    """Return whether each node brings one sum, or where ranks are not in its order, each rank."""
    if list(machines) != sorted(machines):
        return all(count_subtrees(*block, num_leaves) == 1 for block in blocks)
    for name in dict.fromkeys(machines):
        own = [block for block, at in zip(blocks, machines, strict=True) if at == name]
        if count_subtrees(own[0][0], own[-1][1], num_leaves) != 1:
            return False
    return True
