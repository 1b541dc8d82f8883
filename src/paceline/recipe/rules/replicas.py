"""Rules for replication: settings of DDP, and BatchNorm over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.finding import Finding
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.recipe.layout import Layout
from paceline.recipe.rules.words import list_changed, name_degrees


def uses_ddp(layout: Layout) -> bool:
    """Return whether DistributedDataParallel replicates the model."""
    return layout.dp_shard == 1 and layout.num_replicas > 1 and layout.pp == 1


def replication_applies(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield settings of DDP without DDP: it replicates only if dp_shard does not share out data too."""
    if layout.num_ranks == 1 or uses_ddp(layout):
        return
    why = (
        f"with layout.dp_shard={layout.dp_shard}."
        if layout.dp_shard > 1
        else f"with layout.dp_replicate={layout.num_replicas} {name_degrees(layout, shares_data=False)}."
    )
    rule = (
        "Buckets belong to DistributedDataParallel, which is used only with dp_shard=1, pp=1 and "
        "dp_replicate above 1."
    )
    if given := list_changed(run.ddp):
        fix = "Leave it out, or use dp_replicate for these ranks."
        yield Finding("PL141", "ddp", f"{given} {why}", rule, fix)
