"""Counts the memory of a rank at its fullest instant, term by term: `Demand`.

State comes from `plan_memory`. Activations are those that autograd keeps, of as many microbatches as the
schedule has under way. Nothing is fitted; what no arithmetic gives has a range:

- the libraries' own: a CUDA context of 0.4 to 0.8 GB, and 0.05 to 0.4 GB per process group of NCCL (its
  channels' buffers grow with peers; `NCCL_BUFFSIZE` is 4 MiB each). A CPU rank: 0.25 to 0.5 GB for Python and
  torch;
- pieces that the allocator cannot use: up to 6% of what comes and goes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from paceline.pipeline.orders import make_schedule
from paceline.pipeline.simulate import simulate
from paceline.plan.cluster import Cluster
from paceline.plan.costs import ModelCosts, ModelPart
from paceline.plan.memory import Instant, Memory, plan_memory
from paceline.plan.step import cut_stages
from paceline.recipe import Layout

_CONTEXT = (0.4e9, 0.8e9)
_COMMUNICATOR = (0.05e9, 0.4e9)
_CPU_PROCESS = (0.25e9, 0.5e9)
_PIECES = 0.06


@dataclass(frozen=True)
class Demand:
    """The memory of the fullest rank at its fullest instant.

    Attributes:
        terms: bytes by kind, in the order of the step.
        instant: the name of the instant.
        stage: the stage of pp that the rank has first.
        low, high: ends of the total.
    """

    terms: dict[str, float]
    instant: str
    stage: int
    low: float
    high: float

    @property
    def total(self) -> float:
        """The sum of the terms, libraries and pieces at half of their range."""
        return (self.low + self.high) / 2


class Demands:
    """The memory of one model on one cluster; `count` is called for each layout."""

    def __init__(self, costs: ModelCosts, cluster: Cluster) -> None:
        self.costs, self.cluster = costs, cluster
        self._states: dict[tuple[object, ...], dict[Instant, Memory]] = {}

    def count(self, layout: Layout) -> Demand:
        """Return the memory of the fullest rank under a resolved layout."""
        stages = cut_stages(self.costs, layout, after=1.0)
        num = self.costs.count_microbatches(layout.dp)
        homes: tuple[int, ...] = (0,)
        held: tuple[float, ...] = (1.0,)
        if layout.pp > 1:
            homes, held = _hold(layout.schedule, layout.pp, min(num, 2 * layout.pp), layout.chunks)
        found = []
        for rank in dict.fromkeys(homes):
            own = [stage for stage, home in enumerate(homes) if home == rank]
            parts = [part for stage in own for part in stages[stage]]
            found.append(self._fill(parts, layout, num, held[rank] / len(own), own[0]))
        return max(found, key=lambda demand: demand.high)

    def _fill(self, parts: list[ModelPart], layout: Layout, num: int, held: float, stage: int) -> Demand:
        costs = self.costs
        state = self._add_states(parts, layout, num)
        samples = min(costs.microbatch, costs.global_batch) / layout.cp
        activations = held * samples * sum(self._keep(part, layout) for part in parts)
        blocks = [part for part in parts if part.input_bytes]
        again = max((part.kept.divide(layout.tp, sequence=layout.sequence) for part in blocks), default=0.0)
        again = samples * again if layout.recompute != "none" else 0.0
        work = samples * max((part.work_bytes for part in parts), default=0.0) / layout.tp
        loss = samples * costs.loss_bytes / layout.tp if costs.after in parts else 0.0
        numbers = sum(part.num_parameters for part in parts) / layout.tp
        largest = max(part.num_parameters for part in parts) / layout.tp
        copies = 0.0
        if costs.copies_weights:
            copies = 2 * (largest if layout.recompute == "block" else numbers)
        gathered = buffers = 0.0
        if layout.dp_shard > 1 and layout.pp > 1 and layout.zero == 3:
            # A whole stage, and the next action's if it is of another one (parallel/stages/shards.py).
            own = layout.num_stages // layout.pp
            gathered = numbers * min(2, own) / own * costs.sizes.gathered
        elif layout.dp_shard > 1:
            # Blocks on their way: gathered ahead, and whole gradients that are being summed.
            buffers = largest * (costs.sizes.gathered * (1 + costs.prefetch) + costs.sizes.gradient_bytes)
        width = costs.sizes.parameter
        update = 0.0 if self.cluster.processor.is_cpu else numbers / layout.dp_shard * width
        frozen = sum(part.frozen_bytes for part in parts) / (layout.dp_shard if layout.zero == 3 else 1)
        forward, after = state["after_forward"], state["after_step"]
        temporary = max(again + work, loss)
        options = {
            "backward begins": _terms(
                forward, activations=activations, temporary=temporary, copies=copies,
                whole_stages=gathered, buffers=buffers, frozen=frozen,
            ),
            "update": _terms(after, update=update, frozen=frozen),
        }  # fmt: skip
        instant, terms = max(options.items(), key=lambda item: sum(item[1].values()))
        return self._with_range(terms, layout, instant, stage)

    def _keep(self, part: ModelPart, layout: Layout) -> float:
        """Return the bytes that one sample keeps in a part."""
        whole = layout.tp if layout.sequence else 1
        if part.input_bytes and layout.recompute == "block":
            return part.input_bytes / whole
        kept = part.kept_selective if part.input_bytes and layout.recompute == "selective" else part.kept
        return kept.divide(layout.tp, sequence=layout.sequence)

    def _add_states(self, parts: list[ModelPart], layout: Layout, num: int) -> dict[Instant, Memory]:
        """Return the state of all parts; it is a sum over parameters, so equal blocks are counted once."""
        counts = Counter((id(part.products), id(part) if not part.input_bytes else 0) for part in parts)
        by_key = {(id(part.products), id(part) if not part.input_bytes else 0): part for part in parts}
        words = (
            layout.tp,
            layout.dp_shard,
            layout.zero,
            layout.ep,
            layout.num_replicas > 1,
            num,
            layout.offload,
        )
        total: dict[Instant, Memory] = {}
        for key, count in counts.items():
            state = self._states.get((key, words))
            if state is None:
                sizes = replace(self.costs.sizes, num_microbatches=num)
                state = self._states[key, words] = plan_memory(by_key[key].parameters, layout, sizes)
            for instant, memory in state.items():
                before = total.get(instant, Memory())
                total[instant] = Memory(
                    before.parameters + count * memory.parameters,
                    before.gathered + count * memory.gathered,
                    before.gradients + count * memory.gradients,
                    before.set_aside + count * memory.set_aside,
                    before.optimizer + count * memory.optimizer,
                    before.offloaded + count * memory.offloaded,
                )
        return total

    def _with_range(self, terms: dict[str, float], layout: Layout, instant: str, stage: int) -> Demand:
        sure = sum(terms.values())
        moving = sum(
            terms.get(key, 0.0) for key in ("activations", "temporary", "gathered", "whole_stages", "buffers")
        )
        if self.cluster.processor.is_cpu:
            low, high = _CPU_PROCESS
        else:
            several = len(layout.list_several()) + (layout.num_ranks > 1)
            low, high = (c + several * n for c, n in zip(_CONTEXT, _COMMUNICATOR, strict=True))
        return Demand(terms, instant, stage, sure + low, sure + high + _PIECES * moving)


def _terms(memory: Memory, **others: float) -> dict[str, float]:
    state = {
        key: float(getattr(memory, key))
        for key in ("parameters", "gathered", "gradients", "set_aside", "optimizer")
    }
    state["offloaded"] = -float(memory.offloaded)
    return {key: value for key, value in (state | others).items() if value}


@lru_cache(maxsize=512)
def _hold(name: str, ranks: int, num: int, chunks: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the ranks of all stages, and the microbatches of its stages that each rank holds at most."""
    if name == "interleaved":
        num = max(ranks, num // ranks * ranks)
    schedule = make_schedule(name, ranks, num, chunks if chunks > 1 else None)
    return schedule.homes, simulate(schedule).most_kept
