"""Composes the time of an optimizer step from its parts, for one layout on one cluster.

- A matrix product takes its operations at the rate of its shape, or its bytes at the memory's bandwidth,
  whichever is longer (Williams et al. 2009, "Roofline").
- A collective takes alpha-beta time on the links that its group crosses (`Cluster.time`).
- tp, cp and ep wait for their collectives. Gathers of shards and sums of gradients run beside computing: a
  simulation of two streams per rank, block by block, shows what is exposed.
- Under pp, the schedule itself is simulated (`paceline.pipeline.simulate`) with each stage's times. Steps of
  many microbatches are continued from a shorter one by the busiest rank's time.
- Once per step: clipping, the optimizer, and what the cluster file measured beside all that.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

from paceline.pipeline.even_cut import find_starts
from paceline.pipeline.orders import make_schedule
from paceline.pipeline.schedule import Schedule
from paceline.pipeline.simulate import Costs as StageCosts
from paceline.pipeline.simulate import simulate
from paceline.plan.cluster import Cluster, MeasuredProduct
from paceline.plan.costs import ModelCosts, ModelPart, Product
from paceline.plan.fit import Constants
from paceline.plan.traffic import list_part_calls, list_sum_calls
from paceline.recipe import Layout
from paceline.recipe.layout import AS_V, DIVIDED

# Half of the tiles of a wave: 128 x 128 results each, on the 108 to 148 processors of a large GPU.
_HALF_WAVE = 60 * 128 * 128
# Backward of a fused attention computes the scores once more (Dao 2022, "FlashAttention", section 3.1).
_ATTENTION_BACKWARD = 2.5
_MOST_SHAPES = 4
# What dp_shard does on the host per parameter and microbatch, in starts of an operation; the latter: zero=3.
# Operations are 5 to 8 and 9 to 11 of these, the rest is Python (2 ranks on a node, benchmarks/plan).
_HANDLED = (15, 25)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the rank that takes longest, term by term.

    Attributes:
        compute: products and element-wise work, without what is computed twice.
        recompute: second forwards.
        tp, cp, ep: waits for exchanges of activations.
        data: gathers and sums of dp_shard and dp_replicate that computing does not hide.
        bubble: waits of pp for other stages.
        optimizer: update and clipping.
        other: all else: stragglers, and the step's fixed part.
    """

    compute: float = 0.0
    recompute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    data: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """All terms."""
        return math.fsum(vars(self).values())

    @property
    def least(self) -> float:
        """The part that no schedule of pp shortens."""
        return self.total - self.bubble - self.other

    @property
    def communication(self) -> float:
        """The terms that no single rank has."""
        return self.tp + self.cp + self.ep + self.data + self.bubble


@dataclass
class _PartTime:
    """Seconds of a microbatch in one part."""

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)  # of forward and backward together


class StepModel:
    """The model of time for one model on one cluster; `time` is called for each layout.

    Args:
        costs: of the model.
        cluster: that it runs on.
        fit: constants of the model of time.
    """

    def __init__(self, costs: ModelCosts, cluster: Cluster, fit: Constants) -> None:
        self.costs, self.cluster, self.fit = costs, cluster, fit
        self._works: dict[tuple[object, ...], _PartTime] = {}
        self._calls: dict[tuple[object, ...], float] = {}

    def time(self, layout: Layout, *, by_formula: bool = False) -> StepTime:
        """Return the time of a step under a resolved layout.

        Args:
            layout: resolved.
            by_formula: whether to take the bubble of equal stages, and simulate nothing.
        """
        costs = self.costs
        strides = find_strides(layout)
        num = costs.count_microbatches(layout.dp)
        samples = min(costs.microbatch, -(-costs.global_batch // layout.dp))
        stages = cut_stages(costs, layout)
        kinds = {name_stage(stage): stage for stage in stages}  # equal ones take equal times
        works = {
            kind: [self._work(part, samples, layout, strides) for part in stage]
            for kind, stage in kinds.items()
        }
        ranks = {kind: _Rank(self, layout, strides, stage) for kind, stage in kinds.items()}
        if layout.pp == 1:
            ((kind, parts),) = works.items()
            busy = num * sum(work.forward + work.backward for work in parts)
            data = ranks[kind].count_data(parts, num)
            bubble = 0.0
        else:
            sums = {
                kind: (sum(work.forward for work in own), sum(work.backward for work in own))
                for kind, own in works.items()
            }
            each = [sums[name_stage(stage)] for stage in stages]
            busy, bubble = self._pipeline(layout, strides, each, num, samples, by_formula=by_formula)
            data = max(one.count_sums(works[kind], num) for kind, one in ranks.items())
        # The terms of the stage that computes longest.
        longest = max(works.values(), key=lambda parts: sum(work.forward + work.backward for work in parts))
        times = num * (layout.num_stages // layout.pp if layout.pp > 1 else 1)
        waits = {axis: times * sum(w.waits.get(axis, 0.0) for w in longest) for axis in ("tp", "cp", "ep")}
        again = times * sum(work.again for work in longest)
        optimizer = max(one.count_optimizer() for one in ranks.values())
        compute = busy - again - sum(waits.values())
        done = busy + data + bubble + optimizer
        straggle = self.fit.straggle * math.log2(max(1, layout.num_ranks // self.cluster.ranks_per_node))
        other = straggle * done + self.cluster.step_s
        terms = (compute, again, *waits.values(), data, bubble, optimizer, other)
        return StepTime(*(self.costs.factor * term for term in terms))

    def call(self, operation: str, num_bytes: float, degree: int, stride: int) -> float:
        """Return `Cluster.time`, computed once for each call."""
        key = (operation, num_bytes, degree, stride)
        if key not in self._calls:
            self._calls[key] = self.cluster.time(*key)
        return self._calls[key]

    def _work(self, part: ModelPart, samples: float, layout: Layout, strides: dict[str, int]) -> _PartTime:
        key = (
            id(part.products), samples, layout.tp, layout.cp, layout.ep, layout.sequence, layout.recompute,
            *strides.values(),
        )  # fmt: skip
        found = self._works.get(key)
        if found is None:
            found = self._works[key] = self._measure(part, samples, layout, strides)
        return found

    def _measure(self, part: ModelPart, samples: float, layout: Layout, strides: dict[str, int]) -> _PartTime:
        chip, costs = self.cluster.processor, self.costs
        products = [product.divide(layout.tp) for product in part.products]
        forward = backward = 0.0
        for product in products:
            once = self._time_product(product, samples, layout)
            forward += once
            backward += once * (_ATTENTION_BACKWARD if product.is_attention else 1 + product.learns)
        whole = layout.tp if layout.sequence else 1
        moved = samples / layout.cp * (part.moved / layout.tp + part.moved_whole / whole)
        moved_s = moved / (chip.memory_bytes_per_s * self.fit.moved)
        starts = part.calls * chip.call_s if costs.eager or chip.is_cpu else 0.0
        join = operator.add if chip.is_cpu else max
        forward, backward = join(forward + moved_s, starts), join(backward + 2 * moved_s, 2 * starts)
        again = 0.0
        is_block = bool(part.input_bytes)
        if is_block and layout.recompute == "block":
            again = forward
        elif is_block and layout.recompute == "selective":
            linear = sum(self._time_product(p, samples, layout) for p in products if not p.is_attention)
            again = moved_s + costs.selective_again * linear
        waits = self._waits(part, samples, layout, strides, repeats=is_block and layout.recompute == "block")
        extra = sum(waits.values())
        third = extra / 3 if again and layout.recompute == "block" else extra / 2
        return _PartTime(forward + third, backward + again + extra - third, again, waits)

    def _time_product(self, product: Product, samples: float, layout: Layout) -> float:
        """Return the seconds of the forward of one product."""
        chip, size = self.cluster.processor, self.costs.dtype_bytes
        cp = {"cp": layout.cp, "ep": layout.ep_cp, "": 1}[product.divided]
        times = product.times * samples if product.is_attention or product.times != 1 else 1.0
        rows = product.rows * (1.0 if times != 1.0 else samples) / cp
        flops = product.flops * samples / cp
        peak = chip.find_flops(max(2, size) if product.is_attention else size)
        if chip.attention and product.is_attention:
            width, tokens = sorted((product.inner, product.columns))
            rate = find_rate(chip.attention, rows, width, tokens, size)
        elif chip.measured:
            rate = find_rate(chip.measured, rows, product.inner, product.columns, size)
        elif product.is_attention:
            rate = peak * chip.best * self.fit.attention
        else:
            results = rows * product.columns * times
            fill = results / (results + _HALF_WAVE) * product.inner / (product.inner + self.fit.half_inner)
            share = self.fit.product * (self.fit.narrow if size == 1 and 1 in chip.flops else 1.0)
            rate = peak * chip.best * share * fill
        factors = rows * product.inner + product.inner * product.columns
        stored = times * (factors + (0 if product.is_attention else rows * product.columns))
        return max(flops / rate, stored * size / (chip.memory_bytes_per_s * self.fit.moved))

    def _waits(
        self, part: ModelPart, samples: float, layout: Layout, strides: dict[str, int], *, repeats: bool
    ) -> dict[str, float]:
        """Return the seconds of a microbatch's exchanges of activations, forward and backward, by axis."""
        near = {"tp": 1, "cp": strides.get("cp", 1)}
        near["ep"] = near["cp"] if layout.cp > 1 else layout.tp
        found: dict[str, float] = {}
        for call in list_part_calls(part, layout, samples, repeats=repeats):
            once = self.cluster.time(call.operation, call.num_bytes, call.num_ranks, near[call.axis])
            found[call.axis] = found.get(call.axis, 0.0) + call.times * once
        return found

    def _pipeline(
        self,
        layout: Layout,
        strides: dict[str, int],
        works: list[tuple[float, float]],
        num: int,
        samples: float,
        *,
        by_formula: bool,
    ) -> tuple[float, float]:
        """Return the busy seconds of the longest rank, and its waits; `works` are by stage, both ways."""
        forward, backward = zip(*works, strict=True)
        sent = self.costs.blocks[0].width_bytes * samples / layout.cp
        sent /= layout.tp if layout.sequence or self.costs.scatters else 1
        message = self.cluster.time_message(sent, strides["pp"])
        # Gradients of tied weights go from the last stage to the first, one behind the other, and their sum
        # goes back once a step. Those from the last of several stages have time on their way.
        tied = 0.0 if layout.schedule in AS_V else self.costs.count_tied(layout.tp)
        spread = self.cluster.time_message(tied, strides["pp"] * (layout.pp - 1)) if tied else 0.0
        back = self.cluster.time_message(sent + tied * (layout.num_stages == 2), strides["pp"])
        stages = layout.num_stages // layout.pp
        if by_formula:
            each = (sum(forward) + sum(backward)) / layout.pp
            return num * each, max((layout.pp - 1) * each / stages, num * (spread - each)) + spread
        chunks = layout.chunks if layout.chunks > 1 else None
        period = layout.pp if layout.schedule == "interleaved" else 1
        plain = layout.schedule in ("1f1b", "gpipe", "interleaved")
        least = layout.pp + 2 if plain else 2 * layout.pp + 2
        short = min(num, -(-least // period) * period + num % period)
        unit = max(forward)
        level = tuple(round(each / unit * 40) / 40 for each in (*forward, *backward))
        ways = (round(message / unit, 2), round(back / unit, 2))
        named = (layout.schedule, layout.pp, short, chunks)
        busy, rounded = [0.0] * layout.pp, [0.0] * layout.pp
        for stage, home in enumerate(_schedule(*named).homes):
            busy[home] += forward[stage] + backward[stage]
            rounded[home] += level[stage] + level[stage + layout.num_stages]
        longest, waits, total = max(busy), 0.0, _simulate(named, level, ways)
        # Ranks may wait for messages of every microbatch; less than 1% is not worth another simulation.
        if num > short and sum(ways) > 0.01 * max(rounded):
            longer = (layout.schedule, layout.pp, short + layout.pp, chunks)
            waits = max(0.0, (_simulate(longer, level, ways) - total) / layout.pp - max(rounded))
        total = unit * (total + (num - short) * waits) + (num - short) * longest
        return num * longest, max(0.0, total - num * longest, num * (spread - longest)) + spread


@lru_cache(maxsize=512)
def _schedule(name: str, num_ranks: int, num: int, chunks: int | None) -> Schedule:
    return make_schedule(name, num_ranks, num, chunks)


@lru_cache(maxsize=4096)
def _simulate(named: tuple[Any, ...], level: tuple[float, ...], ways: tuple[float, float]) -> float:
    """Return the length of a schedule, by the arguments of `make_schedule`, which are fewer to hash.

    Times are by stage, forwards and then backwards, of the longest, and of a message to the next and back.
    """
    schedule = _schedule(*named)
    half = len(level) // 2
    forward, backward = level[:half], level[half:]
    # Halves of a backward: the gradients of weights take as long as a forward, less what attention takes.
    weight = [
        min(0.5 * b, f) if schedule.name in DIVIDED else 0.5 * b
        for f, b in zip(forward, backward, strict=True)
    ]
    own = [b - w for b, w in zip(backward, weight, strict=True)]
    return simulate(schedule, StageCosts(forward, own, weight, backward, *ways)).total


def find_strides(layout: Layout) -> dict[str, int]:
    """Return the distance in rank numbers of neighbours along each axis."""
    strides, inner = {}, 1
    for axis, degree in reversed(layout.degrees.items()):
        strides[axis] = inner
        inner *= degree
    return strides


def cut_stages(costs: ModelCosts, layout: Layout) -> list[tuple[ModelPart, ...]]:
    """Return the parts of each stage of pp, cut as a training cuts them: by the operations of products.

    Args:
        costs: of the model.
        layout: resolved.
    """
    if layout.pp == 1:
        return [costs.parts]
    work = costs.operations
    if layout.num_stages < len(work):
        # What is behind the blocks belongs to the last one; a published run may have had a stage for it.
        work = (*work[:-2], work[-2] + work[-1])
    starts = find_starts(work, layout.num_stages)
    parts = (*costs.parts[:-1], costs.apart)
    return [parts[first:last] for first, last in pairwise((*starts[:-1], len(parts)))]


def name_stage(parts: Sequence[ModelPart]) -> tuple[int, ...]:
    """Return a key that stages of equal blocks share."""
    return tuple(id(part.products) if part.input_bytes else id(part) for part in parts)


class _Rank:
    """The communication of one stage's rank with its data ranks, and its optimizer."""

    def __init__(
        self, step: StepModel, layout: Layout, strides: dict[str, int], parts: Sequence[ModelPart]
    ) -> None:
        self.step, self.layout, self.strides, self.parts = step, layout, strides, parts
        self.numbers = [part.count_own(layout) for part in parts]
        self.hides = step.costs.overlaps and not step.cluster.processor.is_cpu

    def _sum(self, num_bytes: float) -> float:
        """Return the seconds of summing so many bytes of gradients over all data ranks."""
        return math.fsum(
            call.times
            * self.step.call(call.operation, call.num_bytes, call.num_ranks, self.strides[call.axis])
            for call in list_sum_calls(num_bytes, self.layout, exact=self.step.costs.sizes.exact)
        )

    def _list_gathers(self) -> list[float]:
        """Return the seconds of gathering each part's parameters, frozen ones too."""
        layout, width = self.layout, self.step.costs.sizes.gathered
        if layout.dp_shard == 1:
            return [0.0] * len(self.parts)
        sizes = [p.count_own(layout, sharded=True) * width + p.frozen.divide(layout.tp) for p in self.parts]
        stride = self.strides["dp_shard"]
        return [self.step.call("all_gather", size, layout.dp_shard, stride) for size in sizes]

    def count_data(self, works: list[_PartTime], num: int) -> float:
        """Return the exposed seconds of a step without pp."""
        layout = self.layout
        gathers = self._list_gathers()
        sums = self._list_sums()
        keeps = layout.zero < 3
        nothing = [0.0] * len(gathers)
        sums_each = layout.dp_shard > 1 and layout.zero > 1
        found = 0.0
        # The first microbatch, those between, and the last one: (is first, is last, how many).
        turns = [(True, num == 1, 1), (False, False, num - 2), (False, True, int(num > 1))]
        forward, backward = ([getattr(work, kind) for work in works] for kind in ("forward", "backward"))
        for first, last, times in turns:
            if times > 0:
                forth = gathers if layout.zero == 3 or first else nothing
                back = nothing if keeps else gathers
                summed = sums if last or sums_each else nothing
                found += times * self._expose(forward, forth, nothing)
                found += times * self._expose(backward[::-1], back[::-1], summed[::-1])
        chip = self.step.cluster.processor
        if layout.dp_shard > 1 and chip.is_cpu:  # on a GPU, the host does this while kernels run
            starts = _HANDLED[layout.zero == 3] * sum(len(part.parameters) for part in self.parts)
            found += num * starts * chip.call_s
        return found

    def _list_sums(self) -> list[float]:
        """Return the seconds of summing each part's gradients; DDP's in buckets."""
        width = self.step.costs.sizes.gradient_bytes
        if self.layout.dp_shard > 1:
            once = {numbers: self._sum(numbers * width) for numbers in set(self.numbers)}
            return [once[numbers] for numbers in self.numbers]
        found, filled = [0.0] * len(self.numbers), 0.0
        for place in reversed(range(len(self.numbers))):
            filled += self.numbers[place] * width
            if filled >= self.step.costs.bucket_bytes or place == 0:
                found[place] = self._sum(filled)
                filled = 0.0
        return found

    def _expose(self, computes: list[float], gathers: list[float], sums: list[float]) -> float:
        contention = self.step.fit.contention if self.hides else None
        return expose(computes, gathers, sums, self.step.costs.prefetch, contention)

    def count_sums(self, works: list[_PartTime], num: int) -> float:
        """Return the seconds of a stage's gathers and sums under pp.

        A rank with one stage gathers once per step, and half of that is hidden, as of the sums. With several
        stages and zero=3, each action's stage is gathered while the action before computes.
        """
        layout = self.layout
        sums, gathers = sum(self._list_sums()), sum(self._list_gathers())
        if layout.zero == 3 and layout.num_stages > layout.pp:
            ways = (sum(work.forward for work in works), sum(work.backward for work in works))
            return sums + num * math.fsum(max(0.0, gathers - way) for way in ways)
        hidden = sum(work.backward for work in works) if self.hides else 0.0
        return max(0.0, sums - 0.5 * hidden) + max(0.0, gathers - 0.5 * hidden)

    def count_optimizer(self) -> float:
        """Return the seconds of update and clipping: all is read, and all but gradients written."""
        sizes, chip = self.step.costs.sizes, self.step.cluster.processor
        own = sum(self.numbers) / self.layout.dp_shard
        state = sizes.parameter * sizes.num_moments + sizes.parameter
        moved = own * (2 * state + sizes.gradient_bytes * (3 if self.step.costs.clips else 1))
        rate = chip.memory_bytes_per_s * self.step.fit.moved
        if self.layout.offload == "cpu":
            rate = min(rate, chip.host_bytes_per_s)
        total = moved / rate
        if self.step.costs.clips:
            for axis in ("tp", "dp_shard", "pp"):
                degree = getattr(self.layout, axis)
                total += self.step.cluster.time("all_reduce", 8, degree, self.strides[axis])
        return total


def expose(
    computes: Sequence[float],
    gathers: Sequence[float],
    sums: Sequence[float],
    prefetch: int,
    contention: float | None,
) -> float:
    """Return what two streams take longer than computing alone.

    A gather begins when the part `prefetch` places before it begins to compute; its part waits for it. A sum
    begins when its part has computed. Both take turns on one stream.

    Args:
        computes, gathers, sums: seconds by part, in the order of computing.
        prefetch: parts that are gathered ahead.
        contention: seconds that a second of hidden communication adds; None: nothing is hidden, as on CPU
            ranks, whose cores send, too.
    """
    sent = sum(gathers) + sum(sums)
    if not sent or contention is None:
        return sent
    now = wire = 0.0
    ready: list[float] = []
    for place, compute in enumerate(computes):
        while len(ready) <= min(place + prefetch, len(gathers) - 1):
            gather = gathers[len(ready)]
            # A part that is whole already waits for no sum.
            wire = max(wire, now) + gather if gather else wire
            ready.append(wire if gather else 0.0)
        now = max(now, ready[place]) + compute
        if sums[place]:
            wire = max(wire, now) + sums[place]
    exposed = max(now, wire) - sum(computes)
    return exposed + contention * max(0.0, sent - exposed)


def find_rate(
    measured: Sequence[MeasuredProduct], rows: float, inner: float, columns: float, size: int
) -> float:
    """Return the operations per second of a shape, from the nearest ones that a probe has measured."""
    same = [row for row in measured if row[3] == size] or measured
    wanted = [math.log(max(1.0, each)) for each in (rows, inner, columns)]
    near = sorted(
        (sum((math.log(a) - b) ** 2 for a, b in zip(row[:3], wanted, strict=True)), row[4]) for row in same
    )[:_MOST_SHAPES]
    weights = [1 / (distance + 0.05) for distance, _ in near]
    return math.exp(
        sum(w * math.log(rate) for w, (_, rate) in zip(weights, near, strict=True)) / sum(weights)
    )
