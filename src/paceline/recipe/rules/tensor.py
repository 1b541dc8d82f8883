"""Rules for tensor parallelism: what `tp` and `sequence` divide."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from math import gcd

from paceline.finding import Finding
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.recipe.layout import Layout
from paceline.recipe.rules.words import divisors, list_numbers


def tp_has_matrices(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield tp without matrix products: it splits these between features, while convolutions stay whole."""
    if layout.tp > 1 and not model.splits:
        yield Finding(
            "PL135",
            "layout.tp",
            f"layout.tp={layout.tp} for a model with nothing to split.",
            "tp splits linear layers, attention heads and embeddings; without any, all ranks of tp compute "
            "the same.",
            f"Set tp=1 and give its {layout.tp} ranks to dp_replicate or dp_shard.",
        )


def tp_divides_sizes(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield heads and widths that tp does not divide: each rank holds whole heads, and equal parts."""
    sizes = [
        ("model.heads", model.heads, "whole heads"),
        ("model.kv_heads", model.kv_heads, "whole key and value heads with the query heads that use them"),
        *((name, size, "an equal part of the features between two matrices") for name, size in model.inner),
    ]
    if model.kv_heads == model.heads:
        del sizes[1]
    for name, size, part in sizes:
        if size is not None and size % layout.tp != 0:
            yield Finding(
                "PL132",
                "layout.tp",
                f"layout.tp={layout.tp} does not divide {name}={size}.",
                f"Each rank holds {part}, so tp must be {list_numbers(divisors(size))}.",
                _choose_tp(model, name, layout.tp),
            )


def sequence_is_divided(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield unequal parts of the sequence, and models that need all of it."""
    if not layout.sequence:
        return
    if model.has_router:
        yield Finding(
            "PL652",
            "layout.sequence",
            'layout.sequence=true with model.kind="moe".',
            "A mixture sorts the tokens of all positions by expert, so it needs the whole sequence.",
            "Leave sequence out; tp alone works.",
        )
    if model.seq_len is not None and model.seq_len % layout.tp != 0:
        low = model.seq_len // layout.tp * layout.tp
        yield Finding(
            "PL137",
            "layout.sequence",
            f"layout.sequence=true with layout.tp={layout.tp}, which does not divide "
            f"data.seq_len={model.seq_len}.",
            "Each rank holds an equal part of the sequence.",
            f"Set data.seq_len={low or layout.tp} or {low + layout.tp}, or leave sequence out.",
        )


def _choose_tp(model: ModelFacts, name: str, tp: int) -> str:
    """Return the next move if tp divides one size but not another: the degrees that divide all."""
    sizes = [size for size in (model.heads, model.kv_heads, *(s for _, s in model.inner)) if size is not None]
    choices = divisors(reduce(gcd, sizes))
    near = sorted(sorted(choices, key=lambda n: (max(n / tp, tp / n), n))[:4])
    divide = "divide" if len(near) > 1 else "divides"
    return (
        f"Set tp to {list_numbers(near)}, which {divide} all that is split, or {name} to a multiple of {tp}."
    )
