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
            "ep shares the experts of mixtures among ranks. It finds those of paceline.models.moe.Experts, "
            'which model.kind="moe" has.',
            "Leave ep out: the ranks of dp_replicate then hold copies.",
        )
    elif model.num_experts % layout.ep:
        yield Finding(
            "PL655",
            "layout.ep",
            f"layout.ep={layout.ep} does not divide {model.num_experts} experts.",
            "Each rank of ep holds equally many experts of each mixture.",
            f"Set ep to {list_numbers(divisors(gcd(model.num_experts, layout.dp_replicate or 1)))}.",
        )


def mixtures_have_whole_sequences(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield cp for a model with mixtures: they sort the tokens of all positions."""
    if layout.cp > 1 and model.has_router:
        yield Finding(
            "PL652",
            "layout.cp",
            f'layout.cp={layout.cp} with model.kind="moe".',
            "A mixture sorts the tokens of all positions by expert, so it needs the whole sequence.",
            f"Set cp=1 and give its {layout.cp} ranks to dp_replicate or dp_shard.",
        )


def experts_divide_replicas(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield ep that does not divide dp_replicate: neighbouring replicas share the experts."""
    replicas = layout.dp_replicate or 1
    if replicas % layout.ep:
        choices = divisors(gcd(model.num_experts or replicas, replicas))
        yield Finding(
            "PL654",
            "layout.ep",
            f"layout.ep={layout.ep} does not divide layout.dp_replicate={replicas}.",
            "ep adds no ranks: each group of ep neighbouring ranks of dp_replicate shares one copy of the "
            "experts.",
            f"Set ep to {list_numbers(choices)}, or dp_replicate to a multiple of {layout.ep}.",
        )


def experts_go_with(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield what ep does not go with in this version."""
    if layout.ep == 1:
        return
    ddp = list_changed(run.ddp, besides=frozenset({"bucket_cap_mb", "gradient_as_bucket_view"}))
    mixes = (
        (
            layout.dp_shard > 1,
            "layout.dp_shard",
            f"layout.dp_shard={layout.dp_shard}",
            "Shards are gathered by all data ranks, and ep shares experts among replicas.",
            "Set dp_shard=1, or ep=1.",
        ),
        (
            layout.tp > 1,
            "layout.tp",
            f"layout.tp={layout.tp}",
            "Ranks of tp would all send the same tokens.",
            "Set tp=1, or ep=1.",
        ),
        (
            layout.recompute != "none",
            "layout.recompute",
            f"layout.recompute={layout.recompute}",
            "Backward would send the tokens again, which ranks without a microbatch do not expect.",
            "Leave recompute out, or set ep=1.",
        ),
        (
            bool(ddp),
            "ddp",
            ddp,
            "These settings change when replicas wait for each other, and the ranks of ep wait too.",
            "Leave them out, or set ep=1.",
        ),
        (
            run.has_comm_hook,
            "comm_hook",
            "comm_hook",
            "A hook averages over all replicas, and the gradients of experts are sums over some of them.",
            "Leave the hook out, or set ep=1.",
        ),
        (
            run.compile,
            "train.compile",
            "train.compile=true",
            "Exchanges of tokens would be in the middle of a compiled graph.",
            "Leave compile out, or set ep=1.",
        ),
    )
    yield from refuse_mixes("PL656", f"layout.ep={layout.ep}", mixes)
