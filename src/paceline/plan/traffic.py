"""Lists the collectives of an optimizer step with their bytes: for activations, parameters and gradients.

Bytes are those that a rank sends in a ring, the minimum of any algorithm: of b bytes over n ranks an
all-gather and a reduce-scatter send b (n-1)/n each, an all-reduce both (Rajbhandari et al. 2020, section 7).
Their seconds are summed in `step.py`. Not listed: the agreement of a step, its norm, comparisons of copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.plan.call_sizes import BUS_FACTORS
from paceline.plan.costs import ModelCosts, ModelPart
from paceline.recipe import Layout
from paceline.recipe.layout import AS_V


@dataclass(frozen=True)
class StepCall:
    """A collective that a rank makes a number of times, one call after the other.

    Attributes:
        axis: of the layout.
        operation: a key of `BUS_FACTORS`.
        num_bytes: size of one call, as `call_sizes.py` defines it.
        num_ranks: of a group.
        times: calls.
    """

    axis: str
    operation: str
    num_bytes: float
    num_ranks: int
    times: float = 1

    @property
    def sent_bytes(self) -> float:
        """The bytes that a rank sends."""
        return self.times * self.num_bytes * BUS_FACTORS[self.operation](self.num_ranks)


def list_part_calls(part: ModelPart, layout: Layout, samples: float, *, repeats: bool) -> Iterator[StepCall]:
    """Yield the calls of a microbatch for activations in one part, forward and backward.

    tp sums after attention and after the feed-forward (Shoeybi et al. 2019, section 3); with `sequence` each
    sum is a reduce-scatter and an all-gather (Korthikanti et al. 2022, section 4.2.2). By heads, cp exchanges
    queries, keys, values and the result (Jacobs et al. 2023, section 3); by gather, it sends keys and values
    to all ranks (Dubey et al. 2024, section 3.3.2). ep sends rows to their experts and back.

    Args:
        part: of the model.
        layout: resolved.
        samples: of the microbatch.
        repeats: whether backward begins with a second forward.
    """
    turns, own = 3 if repeats else 2, samples / layout.cp
    # The embedding sums in forward only, the head its input's gradient, in backward.
    sums = part.num_sums * (turns if part.input_bytes else 1)
    if layout.tp > 1 and part.num_sums:
        kinds = ("all_gather", "reduce_scatter") if layout.sequence else ("all_reduce",)
        for kind in kinds:
            yield StepCall("tp", kind, part.width_bytes * own, layout.tp, sums)
    if layout.cp > 1 and part.key_bytes:
        keys, width = (size * samples / layout.tp for size in (part.key_bytes, part.width_bytes))
        if layout.cp_by == "gather":
            yield StepCall("cp", "all_gather", keys, layout.cp, turns)
        else:
            yield StepCall("cp", "all_to_all", (width + keys / 2) / 2 / layout.cp, layout.cp, 4 * turns)
    if layout.cp > 1 and not part.input_bytes and part.width_bytes:
        # The output of the last block, and the gradient of the first one's input.
        yield StepCall("cp", "all_gather", part.width_bytes * samples, layout.cp)
    if not part.routed_bytes:
        return
    if layout.cp > 1:  # a mixture gets whole sequences, and its result is cut
        yield StepCall("cp", "all_gather", part.width_bytes * samples, layout.cp, turns)
    rows = part.routed_bytes * samples
    if layout.ep_cp > 1:  # answers to each other's rows
        yield StepCall("cp", "all_gather", rows, layout.ep_cp, turns)
    if layout.ep_data > 1:
        yield StepCall("ep", "all_to_all", rows / layout.ep_cp, layout.ep_data, 2 * turns)


def list_sum_calls(num_bytes: float, layout: Layout, *, exact: bool) -> Iterator[StepCall]:
    """Yield the calls that sum so many bytes of gradients over all data ranks.

    With the exact reduction each call counts twice where subtrees travel, more than two ranks.
    """
    sends_rows = layout.count_turns(is_exact=True) > 1
    times, left = 2 if exact and layout.dp > 2 and not sends_rows else 1, num_bytes
    if layout.dp_shard > 1:
        yield StepCall("dp_shard", "reduce_scatter", left, layout.dp_shard, times)
        left /= layout.dp_shard
    for axis, degree in (("dp_replicate", layout.num_replicas), ("cp", layout.cp)):
        if degree > 1:
            yield StepCall(axis, "all_reduce", left, degree, times)


def count_sent(costs: ModelCosts, layout: Layout, stages: Sequence[Sequence[ModelPart]]) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, by axis: on each axis, those of the rank that sends most.

    Args:
        costs: of the model.
        layout: resolved.
        stages: its parts, as `cut_stages` returns them.
    """
    num = costs.count_microbatches(layout.dp)
    samples = min(costs.microbatch, -(-costs.global_batch // layout.dp))
    turns = min(num, costs.global_batch / samples)  # the last microbatch may be smaller
    per_rank = len(stages) // layout.pp
    most: dict[str, float] = defaultdict(float)
    for parts in stages:
        sent: dict[str, float] = defaultdict(float)
        for part in parts:
            is_block = bool(part.input_bytes)
            repeats = is_block and layout.recompute == "block"
            for call in list_part_calls(part, layout, samples, repeats=repeats):
                sent[call.axis] += turns * call.sent_bytes
            for call in _list_data_calls(part, costs, layout, num if layout.pp == 1 else 1):
                sent[call.axis] += call.sent_bytes
        for axis, value in sent.items():
            most[axis] = max(most[axis], per_rank * value)
    if layout.pp > 1:
        width = costs.blocks[0].width_bytes * samples / layout.cp / (layout.tp if layout.sequence else 1)
        # Outputs to the next stage, and gradients to the one before; a rank at an end has one of them.
        ends = width + (0 if layout.schedule in AS_V else costs.count_tied(layout.tp))
        most["pp"] = turns * (ends if layout.pp == 2 and per_rank == 1 else max(2 * width * per_rank, ends))
    return dict(most)


def _list_data_calls(part: ModelPart, costs: ModelCosts, layout: Layout, num: int) -> Iterator[StepCall]:
    """Yield the calls of a step for one part's parameters and gradients.

    zero = 3 gathers a block twice per microbatch (what is outside of blocks once) and sums gradients after
    each; 2 gathers once per step; 1 also sums only once. A stage of pp gathers and sums once per step.
    """
    sizes = costs.sizes
    numbers = part.count_own(layout)
    if layout.dp_shard > 1:
        keeps = layout.zero < 3
        times = (num if layout.zero == 3 else 1) * (1 if keeps or not part.input_bytes else 2)
        whole = part.count_own(layout, sharded=True) * sizes.gathered + part.frozen.divide(layout.tp)
        yield StepCall("dp_shard", "all_gather", whole, layout.dp_shard, times)
    for call in list_sum_calls(numbers * sizes.gradient_bytes, layout, exact=sizes.exact):
        if call.axis == "cp" and not part.input_bytes:
            continue  # what is outside of blocks sees whole sequences
        times = num if call.axis == "dp_shard" and layout.zero > 1 else 1
        yield StepCall(call.axis, call.operation, call.num_bytes, call.num_ranks, times * call.times)
