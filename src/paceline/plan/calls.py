"""Lists and times the collectives of a step: which call, of how many bytes, how often, over which ranks.

Bytes follow from the calls, so bytes and seconds have one source. `plan/collectives.py` and
`plan/exact_sums.py` hold the algorithms.

The groups of an axis make their calls at the same time: under dp_replicate=2 tp=2 on two nodes, two sums
cross the link between the nodes. A call is therefore timed with the messages of all groups, and a phase takes
as long as its slowest class of pairs with all messages that share a connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.plan.collectives import BUS_FACTORS, Phase, list_phases, time_phases
from paceline.plan.exact_sums import DIRECT_WHOLE_BYTES, list_exact_phases, list_exact_sums
from paceline.plan.links import Links
from paceline.recipe import Layout
from paceline.recipe.axes import list_axes


@dataclass(frozen=True)
class StepCall:
    """A collective that a rank makes a number of times in a step, one call after the other.

    Attributes:
        operation: a key of `collectives.ALGORITHMS`; `exact_sum` of `plan/exact_sums.py`; or `shift`: in
            n - 1 turns every rank passes on to the next one what it has.
        algorithm: of the operation; `direct` in an exact sum between ranks whose nodes are not known.
        num_bytes: size of one call, as `plan/collectives.py` defines it; of a shift, the parts of all ranks.
        over: the ranks, as `list_call_groups` names them.
        num_ranks: of each group.
        times: calls per step.
        num_subtrees: of an exact sum, the subtrees that the rank brings.
    """

    operation: str
    algorithm: str
    num_bytes: float
    over: str
    num_ranks: int
    times: int = 1
    num_subtrees: int = 1

    @property
    def sent_bytes(self) -> float:
        """The bytes that a rank sends in a step; of an exact sum, by the algorithm `direct`."""
        n = self.num_ranks
        if self.operation == "shift":
            factor = (n - 1) / n
        elif self.operation != "exact_sum":
            factor = BUS_FACTORS[self.operation](n)
        elif self.num_bytes <= DIRECT_WHOLE_BYTES:
            factor = self.num_subtrees * (n - 1)
        else:
            factor = (self.num_subtrees + 1) * (n - 1) / n
        return self.times * factor * self.num_bytes


def count_sent(calls: Iterable[StepCall]) -> float:
    """Return the bytes that a rank sends in a step by all calls together."""
    return sum(call.sent_bytes for call in calls)


def all_reduce(num_bytes: float, over: str, num_ranks: int, times: int = 1) -> StepCall:
    """Return the library's sum of vectors of so many bytes."""
    return StepCall("all_reduce", "ring", num_bytes, over, num_ranks, times)


def all_gather(num_bytes: float, over: str, num_ranks: int, times: int = 1) -> StepCall:
    """Return the library's gather, whose result has so many bytes."""
    return StepCall("all_gather", "ring", num_bytes, over, num_ranks, times)


def reduce_scatter(num_bytes: float, over: str, num_ranks: int, times: int = 1) -> StepCall:
    """Return the sum of which each rank keeps a part: on CPUs an all-to-all and an addition."""
    return StepCall("reduce_scatter", "direct", num_bytes, over, num_ranks, times)


def all_to_all(num_bytes: float, over: str, num_ranks: int, times: int = 1) -> StepCall:
    """Return the exchange in which a rank has so many bytes, its own part included."""
    return StepCall("all_to_all", "direct", num_bytes, over, num_ranks, times)


# ---- ranks


def list_call_groups(layout: Layout, over: str) -> list[list[int]]:
    """Return the groups of ranks that make a call at once; the first one has rank 0.

    Args:
        layout: resolved.
        over: an axis that is a factor of the number of ranks; `dp`, all ranks that train on different
            microbatches; `expert_replicas`, those that hold the same experts; `ep_data` or `ep_cp`, the ranks
            of ep that differ in their data, or in their place of cp. They are those of `mesh.py`.
    """
    data: tuple[str, ...] = ("dp_replicate", "dp_shard")
    if over == "expert_replicas":
        return layout.list_groups(data)
    if over in ("ep_data", "ep_cp"):
        parted = data if over == "ep_data" else ("cp",)
        kept = [axis for axis in layout.degrees if axis not in parted]
        parts = [part for group in layout.list_groups(("ep",)) for part in _split(layout, group, kept)]
        return sorted(parts)
    changed = list_axes(shares_data=True, multiplies=True) if over == "dp" else (over,)
    return sorted(layout.group_by([axis for axis in layout.degrees if axis not in changed]))


def _split(layout: Layout, ranks: Sequence[int], kept: Sequence[str]) -> list[list[int]]:
    """Return the ranks in groups that have the same places along the kept axes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        place = layout.find_place(rank)
        groups.setdefault(tuple(place[axis] for axis in kept), []).append(rank)
    return list(groups.values())


# ---- seconds


def time_call(
    call: StepCall, groups: Sequence[Sequence[int]], nodes: Sequence[int], links: Links
) -> float | None:
    """Return the seconds of one such call by all groups at once, or None if the groups' messages differ.

    They differ if an algorithm depends on the nodes and the groups lie on these in different ways.

    Args:
        call: what each group does.
        groups: of `list_call_groups`.
        nodes: each rank's node, of all ranks.
        links: with every class of pairs that the ranks have.
    """
    by_group = [list_call_phases(call, [nodes[rank] for rank in group]) for group in groups]
    if any(phases is None for phases in by_group):
        return None
    own = [phases for phases in by_group if phases is not None]
    if len(set(map(len, own))) > 1:
        return None
    united = []
    for phases in zip(*own, strict=True):
        if len({replace(phase, edges=()) for phase in phases}) > 1:
            return None
        edges = tuple(
            (group[a], group[b]) for group, phase in zip(groups, phases, strict=True) for a, b in phase.edges
        )
        united.append(replace(phases[0], edges=edges))
    return time_phases(united, nodes, links)


def list_call_phases(call: StepCall, nodes: Sequence[int]) -> list[Phase] | None:
    """Return the phases of one call of a group, or None if its algorithm does not suit the group's nodes.

    Args:
        call: what the group does.
        nodes: of the group's ranks, each of which counts as a machine of an exact sum.
    """
    if call.operation == "shift":
        n = len(nodes)
        edges = tuple((rank, (rank + 1) % n) for rank in range(n))
        return [Phase("exchange", n - 1, call.num_bytes / n, edges)]
    if call.operation == "exact_sum":
        if call.algorithm not in list_exact_sums(nodes):
            return None
        return list_exact_phases(call.algorithm, call.num_bytes, nodes, call.num_subtrees)
    return list_phases(call.operation, call.algorithm, call.num_bytes, nodes)
