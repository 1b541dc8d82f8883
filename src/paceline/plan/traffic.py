"""Lists the collectives of an optimizer step for gradients, parameters and activations, with their bytes.

Bytes are those that a rank sends in a ring, the minimum of any algorithm: of b bytes over n ranks an
all-gather and a reduce-scatter send b (n-1)/n each, an all-reduce both (Rajbhandari et al. 2020, section 7).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paceline.plan.calls import StepCall, all_gather, all_reduce, all_to_all, count_sent, reduce_scatter
from paceline.plan.memory import Sizes, count_padded
from paceline.plan.parameters import Parameter
from paceline.recipe import Layout

# Of DDP's buckets, unless the recipe's ddp.bucket_cap_mb says otherwise.
BUCKET_BYTES = 25 << 20


def plan_traffic(
    parameters: Sequence[Parameter], layout: Layout, sizes: Sizes | None = None
) -> dict[str, float]:
    """Return the bytes that a rank sends per step over `dp_replicate` and `dp_shard`, with the fast
    reduction; the arguments are those of `list_data_calls`."""
    calls = list_data_calls(parameters, layout, sizes)
    return {axis: count_sent(own) for axis, own in calls.items()}


def list_data_calls(
    parameters: Sequence[Parameter],
    layout: Layout,
    sizes: Sizes | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> dict[str, list[StepCall]]:
    """Return the calls of a step over `dp_replicate` and `dp_shard`, with the fast reduction.

    zero = 3 gathers each block twice per microbatch (parameters outside of blocks once) and sums gradients
    after each; 2 gathers once per step; 1 also sums only once per step. Replicas sum theirs once per step:
    whole models in DDP's buckets, shards block by block. Experts that ep shares are summed one by one over
    every ep-th data rank.

    Args:
        parameters: that are trained, whole.
        layout: resolved.
        sizes: of numbers; `num_microbatches` is the largest number that a rank of the layout has.
        bucket_bytes: cap of DDP's buckets.
    """
    sizes = sizes or Sizes()
    assert not sizes.exact, "list_exact_calls has the calls of the exact reduction"
    num_shards, num_replicas = layout.dp_shard, layout.num_replicas
    experts = [p for p in parameters if layout.ep > 1 and p.is_expert]
    copied = [p for p in parameters if layout.ep == 1 or not p.is_expert]
    units: dict[str, int] = {}
    for p in copied:
        units[p.block] = units.get(p.block, 0) + count_padded(p.divide(layout.tp), num_shards)
    shards: list[StepCall] = []
    if num_shards > 1:
        keeps = layout.zero < 3 if sizes.keeps_gathered is None else sizes.keeps_gathered
        num_gathering = 1 if layout.zero < 3 else sizes.num_microbatches
        num_summing = 1 if layout.zero == 1 else sizes.num_microbatches
        for name, numbers in units.items():
            times = num_gathering * (1 if keeps or name == "" else 2)
            shards.append(all_gather(numbers * sizes.gathered, "dp_shard", num_shards, times))
            shards.append(reduce_scatter(numbers * sizes.parameter, "dp_shard", num_shards, num_summing))
    replicas: list[StepCall] = []
    if num_replicas > 1:
        if num_shards > 1:
            summed = [numbers * sizes.parameter // num_shards for numbers in units.values()]
        else:
            summed = list(_fill_buckets(copied, layout, sizes.parameter, bucket_bytes))
        replicas += [all_reduce(num_bytes, "dp_replicate", num_replicas) for num_bytes in summed]
    num_copies = layout.dp // layout.ep_data
    if num_copies > 1:
        for p in experts:
            num_bytes = math.prod(p.divide(layout.tp, layout.ep)) * sizes.parameter
            replicas.append(all_reduce(num_bytes, "expert_replicas", num_copies))
    return {"dp_replicate": replicas, "dp_shard": shards}


def list_exact_calls(
    parameters: Sequence[Parameter],
    layout: Layout,
    *,
    num_subtrees: int = 1,
    number: int = 4,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[StepCall]:
    """Return the calls of a step over `dp_replicate` with the exact reduction, without shards and experts.

    Args:
        parameters: that are trained, whole.
        layout: resolved.
        num_subtrees: that the rank brings to each sum.
        number: bytes of one number.
        bucket_bytes: cap of DDP's buckets, each of which is a sum.
    """
    assert layout.dp_shard == layout.ep == 1, "shards and experts have sums of their own"
    buckets = _fill_buckets(parameters, layout, number, bucket_bytes)
    calls = (StepCall("exact_sum", size, "dp", layout.dp, 1, num_subtrees) for size in buckets)
    return list(calls) if layout.dp > 1 else []


def _fill_buckets(
    parameters: Sequence[Parameter], layout: Layout, number: int, cap_bytes: int
) -> Iterable[int]:
    """Yield the bytes of DDP's buckets: gradients from the last to the first, until the cap is reached.

    All buckets have one cap: DDP's first bucket is smaller only if no cap is given, and Paceline gives one.
    """
    filled = 0
    for p in reversed(parameters):
        filled += math.prod(p.divide(layout.tp)) * number
        if filled >= cap_bytes:
            yield filled
            filled = 0
    if filled:
        yield filled


def list_tp_calls(
    layout: Layout, *, num_blocks: int, num_numbers: int, num_microbatches: int = 1, number: int = 4
) -> list[StepCall]:
    """Return the calls of a step over tp for the activations between blocks.

    One all-reduce after attention and one after the feed-forward of every block, in forward and again in
    backward (Shoeybi et al. 2019, section 3). With `sequence` each of them is a reduce-scatter and an
    all-gather, of the same bytes (Korthikanti et al. 2022, section 4.2.2).

    Args:
        layout: resolved.
        num_blocks: of the model.
        num_numbers: of one activation between blocks: samples x sequence x width of one microbatch.
        num_microbatches: of this size that the rank computes per step.
        number: bytes of one number.
    """
    if layout.tp == 1:
        return []
    whole, times = num_numbers * number, 4 * num_blocks * num_microbatches
    if layout.sequence:
        return [kind(whole, "tp", layout.tp, times) for kind in (all_gather, reduce_scatter)]
    return [all_reduce(whole, "tp", layout.tp, times)]


def list_cp_calls(
    layout: Layout,
    *,
    num_blocks: int,
    num_numbers: int,
    num_keys: int,
    num_mixtures: int = 0,
    num_microbatches: int = 1,
    number: int = 4,
) -> list[StepCall]:
    """Return the calls of a step over cp for activations, without recompute.

    By heads, queries, keys, values and the result are exchanged in forward and in backward (Jacobs et al.
    2023, section 3). By gather, keys and values are sent to all ranks, and their gradients back (Dubey et al.
    2024, section 3.3.2). The output of the last block, the gradient of the first one's input and both ends of
    mixtures are gathered.

    The sum of the gradients once per step is left out: an all-reduce of the parameters of the blocks, except
    for those of mixtures.

    Args:
        layout: resolved; `cp_by = "auto"` counts as by heads.
        num_blocks: of the model.
        num_numbers: of one whole activation: samples x sequence x width of one microbatch.
        num_keys: the same of the keys.
        num_mixtures: of the model.
        num_microbatches: of this size that the rank computes per step.
        number: bytes of one number.
    """
    assert layout.recompute == "none", "a second forward sends again"
    n, whole, keys = layout.cp, num_numbers * number, num_keys * number
    if n == 1:
        return []
    times = num_blocks * num_microbatches
    if layout.cp_by == "gather":
        attention = [all_gather(2 * keys, "cp", n, times), all_to_all(2 * keys, "cp", n, times)]
    else:
        # Queries and the result, and keys and values, of the rank's rows or heads.
        attention = [all_to_all(size / n, "cp", n, 2 * 2 * times) for size in (whole, keys)]
    return [*attention, all_gather(whole, "cp", n, 2 * (1 + num_mixtures) * num_microbatches)]


def list_ep_calls(
    layout: Layout,
    *,
    num_mixtures: int,
    num_rows: int,
    width: int,
    num_experts: int = 0,
    num_microbatches: int = 1,
    number: int = 4,
) -> list[StepCall]:
    """Return the calls of a step over ep for tokens, if all experts are equally full.

    Rows travel to their experts and back, in forward and again in backward; with recompute, once more for the
    second forward. Each forward begins with an exchange of the counts of rows. The ranks of cp that share the
    experts divide the rows, and exchange the answers in forward and the gradients of the rows in backward.

    Args:
        layout: resolved.
        num_mixtures: of the model.
        num_rows: tokens of one microbatch x experts per token.
        width: of a row.
        num_experts: of a mixture, whose counts are exchanged, 8 bytes each; 0: they are left out.
        num_microbatches: of this size that the rank computes per step.
        number: bytes of one number.
    """
    num_forwards = 1 if layout.recompute == "none" else 2
    row_bytes = math.prod((num_rows, width, number))
    num_parts, times = min(layout.ep, layout.cp), num_mixtures * num_microbatches
    calls: list[StepCall] = []
    if layout.ep_data > 1:
        over, n = "ep_data", layout.ep_data
        if num_experts:
            calls.append(all_to_all(8 * num_experts / num_parts, over, n, num_forwards * times))
        calls.append(all_to_all(row_bytes / num_parts, over, n, 2 * (num_forwards + 1) * times))
    if num_parts > 1:
        calls.append(all_to_all(row_bytes, "ep_cp", num_parts, (num_forwards + 1) * times))
    return calls
