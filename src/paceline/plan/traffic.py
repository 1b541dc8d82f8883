"""Computes the bytes that a rank sends for gradients and parameters in an optimizer step, by axis.

They are those of a ring, the minimum of any algorithm: of b bytes over n ranks an all-gather and a
reduce-scatter send b (n-1)/n each, an all-reduce both (Rajbhandari et al. 2020, section 7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.plan.memory import Sizes, count_padded
from paceline.plan.parameters import Parameter
from paceline.recipe import Layout


def plan_traffic(
    parameters: Sequence[Parameter], layout: Layout, sizes: Sizes | None = None
) -> dict[str, float]:
    """Return the bytes that a rank sends per step over `dp_replicate` and `dp_shard`, with the fast
    reduction.

    zero = 3 gathers each block twice per microbatch (parameters outside of blocks once) and sums gradients
    after each; 2 gathers once per step; 1 also sums only once per step. Replicas sum theirs once per step;
    experts that ep shares are summed over every ep-th data rank.

    Args:
        parameters: that are trained, whole.
        layout: resolved.
        sizes: of numbers; `num_microbatches` is the largest number that a rank of the layout has.
    """
    sizes = sizes or Sizes()
    assert not sizes.exact, "the exact reduction sends whole vectors, by the plan of comm/tree.py"
    num_shards, num_rounds = layout.dp_shard, sizes.num_microbatches
    copied = [p for p in parameters if layout.ep == 1 or not p.is_expert]
    experts = sum(math.prod(p.divide(layout.tp, layout.ep)) for p in parameters if p not in copied)
    whole = sum(count_padded(p.divide(layout.tp), num_shards) for p in copied)
    root = sum(count_padded(p.divide(layout.tp), num_shards) for p in copied if p.block == "")
    keeps = layout.zero < 3 if sizes.keeps_gathered is None else sizes.keeps_gathered
    gathers = whole if keeps else 2 * whole - root
    gathers *= 1 if layout.zero < 3 else num_rounds
    sums = whole * (1 if layout.zero == 1 else num_rounds)
    replicated = _ring(layout.num_replicas) * whole / num_shards
    replicated += _ring(layout.dp // layout.ep_data) * experts
    return {
        "dp_replicate": 2 * replicated * sizes.parameter,
        "dp_shard": _ring(num_shards) * (gathers * sizes.gathered + sums * sizes.parameter),
    }


def plan_tp_traffic(
    layout: Layout, *, num_blocks: int, num_numbers: int, num_microbatches: int = 1, number: int = 4
) -> float:
    """Return the bytes that a rank sends per step over tp for the activations between blocks.

    One all-reduce after attention and one after the feed-forward of every block, in forward and again in
    backward (Shoeybi et al. 2019, section 3). With `sequence` each of them is a reduce-scatter and an
    all-gather, of the same bytes (Korthikanti et al. 2022, section 4.2.2).

    Args:
        layout: resolved.
        num_blocks: of the model.
        num_numbers: of one activation between blocks: samples x sequence x width of one microbatch.
        num_microbatches: that the rank computes per step.
        number: bytes of one number.
    """
    return 4 * num_blocks * num_microbatches * 2 * _ring(layout.tp) * math.prod((num_numbers, number))


def plan_cp_traffic(
    layout: Layout,
    *,
    num_blocks: int,
    num_numbers: int,
    num_keys: int,
    num_mixtures: int = 0,
    num_microbatches: int = 1,
    number: int = 4,
) -> float:
    """Return the bytes that a rank sends per step over cp for activations, without recompute.

    By heads, queries, keys, values and the result are exchanged in forward and in backward (Jacobs et al.
    2023, section 3). By gather, keys and values are sent to all ranks, and their gradients back (Dubey et al.
    2024, section 3.3.2). By ring, backward sends keys, values and their gradients (Liu et al. 2023). The
    output of the last block, the gradient of the first one's input and both ends of mixtures are gathered.

    The sum of the gradients once per step is left out: an all-reduce of the parameters of the blocks, except
    for those of mixtures.

    Args:
        layout: resolved; `cp_by = "auto"` counts as by heads.
        num_blocks: of the model.
        num_numbers: of one whole activation: samples x sequence x width of one microbatch.
        num_keys: the same of the keys.
        num_mixtures: of the model.
        num_microbatches: that the rank computes per step.
        number: bytes of one number.
    """
    assert layout.recompute == "none", "a second forward sends again"
    pairs = {
        "gather": 2 * 2 * num_keys,
        "ring": 3 * 2 * num_keys,
    }.get(layout.cp_by, 2 * (2 * num_numbers + 2 * num_keys) / layout.cp)
    gathered = 2 * (1 + num_mixtures) * num_numbers
    return _ring(layout.cp) * (num_blocks * pairs + gathered) * num_microbatches * number


def plan_ep_traffic(
    layout: Layout,
    *,
    num_mixtures: int,
    num_rows: int,
    width: int,
    num_microbatches: int = 1,
    number: int = 4,
) -> float:
    """Return the bytes that a rank sends per step over ep for tokens, if all experts are equally full.

    Rows travel to their experts and back, in forward and again in backward; with recompute, once more for the
    second forward. The counts of rows, 8 bytes per expert, are left out. The ranks of cp that share the
    experts divide the rows, and exchange the answers in forward and the gradients of the rows in backward.

    Args:
        layout: resolved.
        num_mixtures: of the model.
        num_rows: tokens of one microbatch x experts per token.
        width: of a row.
        num_microbatches: that the rank computes per step.
        number: bytes of one number.
    """
    num_forwards = 1 if layout.recompute == "none" else 2
    row_bytes = math.prod((num_rows, width, number))
    num_parts = min(layout.ep, layout.cp)
    travelling = 2 * (num_forwards + 1) * _ring(layout.ep_data) / num_parts
    exchanged = (num_forwards + 1) * _ring(num_parts)
    return num_mixtures * num_microbatches * (travelling + exchanged) * row_bytes


def _ring(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks
