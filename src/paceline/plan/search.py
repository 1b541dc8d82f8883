"""Finds the layouts that fit, ranks them by time, and records why the others do not come first.

`recipe/rules` decides what is legal. Of each degrees, zero, sequence and schedule, the least recompute and
offload that fits is timed: more of it only takes longer. Two layouts whose times differ by less than the
errors within one publication are a tie: what is wrong for both cancels.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from paceline.errors import PacelineError
from paceline.plan.cluster import Cluster
from paceline.plan.costs import ModelCosts
from paceline.plan.demand import Demand, Demands
from paceline.plan.fit import Constants, load_fit
from paceline.plan.step import StepModel, StepTime
from paceline.recipe import Layout, Rules
from paceline.recipe.axes import AXES
from paceline.recipe.layout import CHOICES

# Interleaved schedules with so many stages per rank are tried beside 1f1b.
_CHUNKS = 2
# Pipelines that are simulated: of the fastest by formula, and of each family.
_MOST_REFINED, _FEW = 24, 2
# Twice the nodes must need less memory per rank than this part of it, or no number of nodes is enough.
_LESS = 0.98


@dataclass(frozen=True)
class Candidate:
    """A legal layout with its memory, and with its time if it fits."""

    layout: Layout
    demand: Demand
    time: StepTime | None = None

    @property
    def family(self) -> str:
        """The axes that have several ranks."""
        return name_family(self.layout)

    @property
    def seconds(self) -> float:
        """The time of a step; infinite if it does not fit."""
        return math.inf if self.time is None else self.time.total


@dataclass(frozen=True)
class Plan:
    """The result of a search.

    Attributes:
        costs, cluster: that it is for.
        fitting: those that fit, fastest first.
        smallest: what needs least memory.
        num_legal, num_candidates: that were looked at.
        fallen: why a family is not among the fitting ones, by family.
        tie: share by which two times must differ to be told apart.
    """

    costs: ModelCosts
    cluster: Cluster
    fitting: tuple[Candidate, ...]
    smallest: Candidate | None
    num_legal: int
    num_candidates: int
    fallen: dict[str, str]
    tie: float

    @cached_property
    def best_by_family(self) -> tuple[Candidate, ...]:
        """The fastest of each family, fastest first."""
        found: dict[str, Candidate] = {}
        for candidate in self.fitting:
            found.setdefault(candidate.family, candidate)
        return tuple(found.values())

    @cached_property
    def ties(self) -> tuple[Candidate, ...]:
        """Those of other kinds that cannot be told from the fastest."""
        return tuple(
            c for c in self.best_by_family[1:] if c.seconds <= self.fitting[0].seconds * (1 + self.tie)
        )

    @cached_property
    def front(self) -> tuple[Candidate, ...]:
        """Those than which none is both faster and smaller."""
        found: list[Candidate] = []
        for candidate in self.fitting:
            if not found or candidate.demand.high < 0.98 * found[-1].demand.high:
                found.append(candidate)
        return tuple(found)


def name_family(layout: Layout) -> str:
    """Return the axes of several ranks, as `dp_shard tp`; `one rank` for none."""
    return " ".join(layout.list_several()) or "one rank"


def find_tie() -> float:
    """Return half of the width of the bar within publications."""
    low, high = load_fit()["bars"]["calibrated"]["0.8"]
    return (math.exp(high) - math.exp(low)) / 2


def search(
    costs: ModelCosts, rules: Rules, cluster: Cluster, fit: Constants, *, limit: float | None = None
) -> Plan:
    """Return all legal layouts on a cluster's ranks that fit, by time.

    Args:
        costs: of the model.
        rules: of the model and the run.
        cluster: whose ranks are all used.
        fit: constants of the model of time.
        limit: bytes of memory of a rank; default: what the processor has.
    """
    limit = find_limit(cluster) if limit is None else limit
    recompute = CHOICES["recompute"] if rules.model.num_blocks != 0 else ("none",)
    offloads = ("none",) if cluster.processor.is_cpu else ("none", "cpu")
    legal, num = rules.enumerate(cluster.num_ranks, recompute, offloads)
    demands, step = Demands(costs, cluster), StepModel(costs, cluster, fit)
    groups: dict[Layout, list[Layout]] = {}
    for layout in legal:
        groups.setdefault(replace(layout, recompute="none", offload="none"), []).append(layout)
    order = {word: place for place, word in enumerate((*CHOICES["recompute"][:1], "selective", "block"))}
    fitting, smallest = list[Candidate](), None
    least: dict[str, Demand] = {}
    for own in groups.values():
        for layout in sorted(own, key=lambda each: (each.offload != "none", order[each.recompute])):
            demand = demands.count(layout)
            candidate = Candidate(layout, demand)
            if smallest is None or demand.high < smallest.demand.high:
                smallest = candidate
            family = candidate.family
            if family not in least or demand.high < least[family].high:
                least[family] = demand
            if demand.high <= limit:
                fitting.append(Candidate(layout, demand, step.time(layout, by_formula=True)))
                break
    fitting = _refine(fitting, step, demands, rules, limit)
    fallen = _explain(rules, cluster, {c.family for c in fitting}, least, limit)
    return Plan(costs, cluster, tuple(fitting), smallest, len(legal), num, fallen, find_tie())


def _refine(
    candidates: list[Candidate], step: StepModel, demands: Demands, rules: Rules, limit: float
) -> list[Candidate]:
    """Return the candidates by time, those with pp simulated under several schedules.

    Of those, the first two of each family and the first of all by a formula are kept, unless even without any
    bubble they would be slower than another one of their family.
    """
    candidates.sort(key=lambda candidate: candidate.seconds)
    least: dict[str, float] = {}
    seen: Counter[str] = Counter()
    found = []
    for place, candidate in enumerate(candidates):
        time, family = candidate.time, candidate.family
        assert time is not None
        if candidate.layout.pp == 1:
            found.append(candidate)
        elif place < _MOST_REFINED or seen[family] < _FEW:
            seen[family] += 1
            if time.least >= least.get(family, math.inf):
                continue
            for layout in (candidate.layout, *_list_schedules(candidate.layout, rules)):
                demand = demands.count(layout)
                if demand.high <= limit:
                    found.append(Candidate(layout, demand, step.time(layout)))
                    least[family] = min(least.get(family, math.inf), found[-1].seconds)
    return sorted(found, key=lambda candidate: candidate.seconds)


def plan_one(
    costs: ModelCosts,
    rules: Rules,
    cluster: Cluster,
    fit: Constants,
    text: str,
    *,
    limit: float | None = None,
) -> Plan:
    """Return the plan of one layout.

    Raises:
        PacelineError: for words that are no layout; `LayoutErrors` for one that is not legal.
    """
    layout = Layout.parse(text)
    rules.refuse(layout, cluster.num_ranks)
    layout = layout.resolve(cluster.num_ranks)
    demand = Demands(costs, cluster).count(layout)
    limit = find_limit(cluster) if limit is None else limit
    fits = demand.high <= limit
    timed = Candidate(layout, demand, StepModel(costs, cluster, fit).time(layout) if fits else None)
    return Plan(costs, cluster, (timed,) if fits else (), timed, 1, 1, {}, find_tie())


def check_ranks(cluster: Cluster, num_ranks: int) -> Cluster:
    """Return the part of a cluster with so many ranks.

    Raises:
        PacelineError: PL936 for more than there are, or for no whole number of nodes.
    """
    own = cluster.ranks_per_node
    if num_ranks < 1 or num_ranks > cluster.num_ranks or (num_ranks > own and num_ranks % own):
        near = max(own, num_ranks // own * own)
        raise PacelineError(
            "PL936",
            saw=f"--nproc {num_ranks} on {cluster.nodes} nodes of {own}.",
            rule="Ranks fill whole nodes, or a part of one node; there are no more than the cluster has.",
            fix=f"Use --nproc {min(near, cluster.num_ranks)}, or another cluster.",
        )
    return replace(cluster, nodes=max(1, num_ranks // own), ranks_per_node=min(num_ranks, own))


def find_limit(cluster: Cluster) -> float:
    """Return the bytes that a rank may use."""
    chip = cluster.processor
    # A GPU's "80 GB" are binary, less what the driver keeps.
    return chip.memory_bytes if cluster.is_probed else chip.memory_bytes * 1.0737 * 0.99


def _list_schedules(layout: Layout, rules: Rules) -> Iterable[Layout]:
    num = rules.run.num_microbatches
    for words in ({"schedule": "interleaved", "chunks": _CHUNKS}, {"schedule": "zero_bubble"}):
        tried = replace(layout, **words)
        divides = num is None or num // layout.dp % layout.pp == 0 or tried.schedule != "interleaved"
        if divides and not rules.check(tried, layout.num_ranks):
            yield tried


def _explain(
    rules: Rules, cluster: Cluster, fit: set[str], least: dict[str, Demand], limit: float
) -> dict[str, str]:
    """Return a line for each axis by itself, and each legal family, that has no layout that fits."""
    found = {}
    for family, demand in sorted(least.items(), key=lambda item: item[1].high):
        if family not in fit:
            found[family] = f"needs {demand.low / 1e9:.1f} to {demand.high / 1e9:.1f} GB of {limit / 1e9:.1f}"
    for axis in AXES:
        if any(axis.name in family.split() for family in least) or cluster.num_ranks == 1:
            continue
        degree = next(n for n in range(2, cluster.num_ranks + 1) if cluster.num_ranks % n == 0)
        words: dict[str, Any] = {axis.name: degree}
        if axis.multiplies:
            words.setdefault("dp_replicate", cluster.num_ranks // degree)
        else:
            words["dp_replicate"] = cluster.num_ranks
        reasons = rules.check(Layout(**words), cluster.num_ranks)
        if reasons:
            found[f"any {axis.name}"] = f"{reasons[0].saw} {reasons[0].rule} [{reasons[0].code}]"
    return found


def vary(found: Plan, fit: Constants) -> list[tuple[str, Layout]]:
    """Return the changes of the links by which another family would be faster, each with its layout."""
    results, best = [], found.fitting[0].layout
    wires = {"between": found.cluster.between, "inside": found.cluster.inside}
    for (name, wire), factor in itertools.product(wires.items(), (0.25, 4.0)):
        if wire is None:
            continue
        calls = {key: (empty, rate * factor) for key, (empty, rate) in wire.calls.items()}
        changed: dict[str, Any] = {name: replace(wire, bytes_per_s=wire.bytes_per_s * factor, calls=calls)}
        step = StepModel(found.costs, replace(found.cluster, **changed), fit)
        own_s = first_s = step.time(best).total
        first = best
        bounds = {c.layout: step.time(c.layout, by_formula=True).least for c in found.best_by_family}
        for layout in sorted(bounds, key=bounds.__getitem__):
            if bounds[layout] < first_s and (seconds := step.time(layout).total) < first_s:
                first, first_s = layout, seconds
        if own_s > first_s * (1 + found.tie / 4):
            rate = wire.bytes_per_s * factor * 8 / 1e9
            results.append((f"with {rate:.3g} Gbit/s per rank {name} nodes (x{factor:g})", first))
    return results


def grow(
    costs: ModelCosts,
    rules: Rules,
    cluster: Cluster,
    fit: Constants,
    most_nodes: int = 4096,
    limit: float | None = None,
) -> Plan | None:
    """Return the search on the least doubling of the nodes on which a layout fits."""
    if cluster.between is None:
        return None
    nodes, least = cluster.nodes, math.inf
    while nodes < most_nodes:
        nodes *= 2
        found = search(costs, rules, replace(cluster, nodes=nodes), fit, limit=limit)
        if found.fitting:
            return found
        now = math.inf if found.smallest is None else found.smallest.demand.total
        if now > _LESS * least:
            return None  # what is left, no rank shares
        least = now
    return None
