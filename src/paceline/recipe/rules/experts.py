"""The rules for ep, which shares the experts of mixtures among ranks."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from paceline.finding import Finding
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.recipe.layout import Layout
from paceline.recipe.rules.words import divisors, list_changed, list_numbers, refuse_mixes


def experts_are_there(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield ep for a model without experts, or experts that it does not divide: a rank holds whole ones."""
    if layout.ep == 1 or model.num_experts is None:
        return
    if not model.num_experts:
        yield Finding(
            "PL653",
            "layout.ep",
            f"layout.ep={layout.ep} for a model without experts.",
            "ep shares the experts of mixtures among ranks. It applies to those of "
            "paceline.models.moe.Experts, "
            'which model.kind="moe" has, and those of transformers.',
            "Leave ep out: every data rank then has the whole model, or a shard of it.",
        )
    elif model.num_experts % layout.ep:
        yield Finding(
            "PL655",
            "layout.ep",
            f"layout.ep={layout.ep} does not divide {model.num_experts} experts.",
            "Each rank of ep holds the same number of experts of each mixture.",
            f"Set ep to {list_numbers(divisors(gcd(model.num_experts, _count_data(layout))))}.",
        )


def experts_divide_data_ranks(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield ep that does not divide the ranks of data and cp: neighbours among these share the experts."""
    num_ranks = _count_data(layout)
    choices = divisors(gcd(model.num_experts or num_ranks, num_ranks))
    inner = "".join(
        f" x layout.{axis}={n}" for axis in ("dp_shard", "cp") if (n := getattr(layout, axis)) > 1
    )
    if num_ranks % layout.ep:
        yield Finding(
            "PL654",
            "layout.ep",
            f"layout.ep={layout.ep} does not divide layout.dp_replicate={layout.dp_replicate or 1}{inner}.",
            "ep adds no ranks: each group of ep neighbouring data ranks shares one copy of the experts.",
            f"Set ep to {list_numbers([n for n in choices if _nests(n, layout.cp)])}, or dp_replicate to a "
            f"multiple of {layout.ep}.",
        )
    elif not _nests(layout.ep, layout.cp):
        yield Finding(
            "PL654",
            "layout.ep",
            f"layout.ep={layout.ep} with layout.cp={layout.cp}.",
            "The ranks of cp, which have the same tokens, share the experts before data ranks do, so ep "
            "must be a divisor or a multiple of cp.",
            f"Set ep to {list_numbers([n for n in choices if _nests(n, layout.cp)])}.",
        )


def _nests(ep: int, cp: int) -> bool:
    return ep % cp == 0 or cp % ep == 0


def _count_data(layout: Layout) -> int:
    return (layout.dp_replicate or 1) * layout.dp_shard * layout.cp


def experts_go_with(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield what cannot be combined with ep in this version."""
    if layout.ep == 1:
        return
    ddp = list_changed(run.ddp, besides=frozenset({"bucket_cap_mb", "gradient_as_bucket_view"}))
    mixes = (
        (
            layout.offload != "none",
            "layout.offload",
            f"layout.offload={layout.offload}",
            "Experts are not sharded, and offloading moves shards.",
            "Leave offload out, or set ep=1.",
        ),
        (
            run.shard.param_dtype != "none",
            "shard.param_dtype",
            f"shard.param_dtype={run.shard.param_dtype}",
            "It converts parameters when they are gathered, and experts are not gathered.",
            "Set train.dtype instead, or ep=1.",
        ),
        (
            bool(ddp),
            "ddp",
            ddp,
            "These settings change when replicas wait for each other, and the ranks of ep wait too.",
            "Leave them out, or set ep=1.",
        ),
        (
            run.compile,
            "train.compile",
            "train.compile=true",
            "Exchanges of tokens would be in the middle of a compiled graph.",
            "Leave compile out, or set ep=1.",
        ),
    )
    yield from refuse_mixes(f"layout.ep={layout.ep}", mixes)
