"""Counts the memory of a rank at its fullest instant, term by term: `Demand`.

State comes from `plan_memory`. Activations are those that autograd keeps, of as many microbatches as the
schedule has under way. The libraries' own memory is taken in the middle of what is known: 0.4 to 0.8 GB for a
CUDA context, 0.05 to 0.4 GB per process group of NCCL (its channels' buffers grow with peers;
`NCCL_BUFFSIZE` is 4 MiB each), and 0.25 to 0.5 GB for Python and torch of a CPU rank. Nothing is fitted; the
interval around the count is that of published peaks (`fit.find_memory_interval`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from paceline.pipeline.orders import make_schedule
from paceline.pipeline.simulate import simulate
from paceline.plan.cluster import Cluster
from paceline.plan.costs import ModelCosts, ModelPart
from paceline.plan.fit import find_memory_interval
from paceline.plan.model_state import Instant, Memory, plan_memory
from paceline.plan.step import cut_stages, name_stage
from paceline.recipe import Layout

# The instants at which a rank is fullest.
_FULLEST: tuple[Instant, ...] = ("after_forward", "after_step")
_CONTEXT, _COMMUNICATOR, _CPU_PROCESS = 0.6e9, 0.225e9, 0.375e9


@dataclass(frozen=True)
class Demand:
    """The memory of the fullest rank at its fullest instant.

    Attributes:
        terms: bytes by kind, in the order of the step.
        instant: the name of the instant.
        stage: the stage of pp that the rank has first.
    """

    terms: dict[str, float]
    instant: str
    stage: int

    @cached_property
    def total(self) -> float:
        """The sum of the terms."""
        return sum(self.terms.values())

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.total * find_memory_interval()[0]

    @property
    def high(self) -> float:
        """The upper end of the interval, which must fit."""
        return self.total * find_memory_interval()[1]


class Demands:
    """The memory of one model on one cluster; `count` is called for each layout."""

    def __init__(self, costs: ModelCosts, cluster: Cluster) -> None:
        self.costs, self.cluster = costs, cluster
        self._states: dict[tuple[object, ...], dict[Instant, Memory]] = {}

    def count(self, layout: Layout) -> Demand:
        """Return the memory of the fullest rank under a resolved layout."""
        stages = cut_stages(self.costs, layout)
        num = self.costs.count_microbatches(layout.dp)
        homes: tuple[int, ...] = (0,)
        held: tuple[float, ...] = (1.0,)
        if layout.pp > 1:
            homes, held = _hold(layout.schedule, layout.pp, min(num, 2 * layout.pp), layout.chunks)
        # Of ranks with equal stages, the one that holds the most microbatches is the fullest.
        fullest: dict[tuple[object, ...], tuple[float, int, list[ModelPart]]] = {}
        for rank in dict.fromkeys(homes):
            own = [stage for stage, home in enumerate(homes) if home == rank]
            parts = [part for stage in own for part in stages[stage]]
            one = (held[rank] / len(own), own[0], parts)
            kind = name_stage(parts)
            fullest[kind] = max(fullest.get(kind, one), one, key=lambda each: each[0])
        found = [self._fill(parts, layout, num, most, stage) for most, stage, parts in fullest.values()]
        return max(found, key=lambda demand: demand.total)

    def _fill(self, parts: list[ModelPart], layout: Layout, num: int, held: float, stage: int) -> Demand:
        costs, sizes = self.costs, self.costs.sizes
        forward, after = self._add_states(parts, layout, num).values()
        samples = min(costs.microbatch, costs.global_batch)
        blocks = [part for part in parts if part.input_bytes]
        keeps = [samples * self._keep(part, layout, layout.recompute) for part in parts]
        kept = held * sum(keeps)
        ends = keeps[-1] if parts[-1] is costs.after or parts[-1] is costs.apart else 0.0
        alike = {id(part.products): part for part in blocks or parts}.values()
        # What a second forward adds to what the block has kept, and what is temporary in its backward.
        work = samples * max(
            self._keep(part, layout, "none")
            - self._keep(part, layout, layout.recompute)
            + part.work_bytes / layout.tp / (1 if part.kept.mixed else layout.cp)
            for part in alike
        )
        loss = samples * max(costs.loss_bytes, costs.after.work_bytes) / layout.tp if ends else 0.0
        numbers = sum(part.num_parameters for part in parts) / layout.tp
        if layout.ep > 1:
            numbers = sum(part.count_own(layout, sharded=True) for part in parts)
        largest = max(part.count_own(layout, sharded=True) for part in alike)
        copies = 0.0
        if costs.copies_weights:
            copies = 2 * (largest if layout.recompute == "block" else numbers)
        gathered = 0.0
        # A gradient is made before it is added to.
        most = max(part.most_numbers for part in alike)
        buffers = most / layout.tp / layout.ep * sizes.gradient_bytes
        if layout.dp_shard > 1 and layout.pp > 1 and layout.zero == 3:
            # A whole stage, and the next action's if it is of another one (parallel/stages/stage_shards.py).
            stages = layout.num_stages // layout.pp
            gathered = numbers * min(2, stages) / stages * sizes.gathered
        elif layout.dp_shard > 1:
            # Whole gradients that are being summed, and blocks that are gathered ahead.
            ahead = 1 + costs.prefetch if layout.zero == 3 else 0
            whole_block = largest * sizes.gathered + max(p.frozen.divide(layout.tp) for p in alike)
            buffers = largest * sizes.gradient_bytes + ahead * whole_block
        frozen = sum(part.frozen.divide(layout.tp) for part in parts) / layout.dp_shard
        if layout.dp_shard > 1:  # what is outside of blocks stays gathered
            stays = (part for part in parts if layout.zero < 3 or not part.input_bytes)
            frozen += sum(part.frozen.divide(layout.tp) for part in stays)
        update = 0.0 if self.cluster.processor.is_cpu else numbers / layout.dp_shard * sizes.parameter
        if layout.cp > 1:  # gradients are summed as one vector
            update = max(update, numbers / layout.dp_shard * sizes.gradient_bytes)
        libraries = _CPU_PROCESS
        if not self.cluster.processor.is_cpu:
            groups = len(layout.list_several()) + (layout.num_ranks > 1)
            libraries = _CONTEXT + groups * _COMMUNICATOR
        # Under pp, outputs wait for their gradients, and two messages are on their way.
        width = costs.blocks[0].width_bytes / (layout.tp if layout.sequence else 1)
        messages = (held + 2) * samples / layout.cp * width if layout.pp > 1 else 0.0
        common = {"messages": messages, "copies": copies, "whole_stages": gathered}
        common |= {"frozen": frozen, "libraries": libraries}
        last = forward | {"activations": kept - ends, "temporary": work, "buffers": buffers} | common
        # By then the gradients of all other blocks are there.
        first = last | {"gradients": max(forward["gradients"], after["gradients"])}
        if layout.dp_shard == 1:
            first["gradients"] = after["gradients"]
        options = {
            "the loss is computed": forward | {"activations": kept, "temporary": loss} | common,
            "backward begins": last,
            "backward ends": first | {"activations": kept - sum(keeps[2:])},
            "update": after | {"update": update, "frozen": frozen, "libraries": libraries},
        }
        instant, terms = max(options.items(), key=lambda item: sum(item[1].values()))
        return Demand({key: value for key, value in terms.items() if value}, instant, stage)

    def _keep(self, part: ModelPart, layout: Layout, recompute: str) -> float:
        """Return the bytes that one sample keeps in a part; outside of blocks, ranks of cp see all rows."""
        if not part.input_bytes:
            return part.kept.divide(layout.tp, sequence=layout.sequence)
        if recompute == "block":
            return part.input_bytes / (layout.tp if layout.sequence else 1) / layout.cp
        kept = part.kept_selective if recompute == "selective" else part.kept
        return kept.divide(layout.tp, layout.cp, layout.ep_cp, sequence=layout.sequence)

    def _add_states(
        self, parts: list[ModelPart], layout: Layout, num: int
    ) -> dict[Instant, dict[str, float]]:
        """Return the state of all parts; it is a sum over parameters, so equal blocks are counted once."""
        kinds = name_stage(parts)
        by_key = dict(zip(kinds, parts, strict=True))
        words = (
            *(layout.tp, layout.dp_shard, layout.zero, layout.ep, layout.num_replicas > 1, layout.pp > 1),
            *(num, layout.offload, layout.count_turns(is_exact=True)),
        )
        total: dict[Instant, dict[str, float]] = {instant: defaultdict(float) for instant in _FULLEST}
        for key, count in Counter(kinds).items():
            state = self._states.get((key, words))
            if state is None:
                sizes = replace(self.costs.sizes, num_microbatches=num)
                state = self._states[key, words] = plan_memory(by_key[key].parameters, layout, sizes)
            for instant, terms in total.items():
                for name, num_bytes in vars(state[instant]).items():
                    terms[name] += count * num_bytes * (-1 if name == "offloaded" else 1)
        return total


@lru_cache(maxsize=512)
def _hold(name: str, ranks: int, num: int, chunks: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the ranks of all stages, and the microbatches of its stages that each rank holds at most."""
    if name == "interleaved":
        num = max(ranks, num // ranks * ranks)
    schedule = make_schedule(name, ranks, num, chunks if chunks > 1 else None)
    return schedule.homes, simulate(schedule).most_kept
