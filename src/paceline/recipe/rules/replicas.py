"""Rules for replication: settings of DDP, and BatchNorm over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.finding import Finding
from paceline.recipe.axes import list_axes
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
        "Buckets and hooks belong to DistributedDataParallel, which is used only with dp_shard=1, pp=1 and "
        "dp_replicate above 1."
    )
    changed = list_changed(run.ddp)
    if changed:
        yield Finding("PL141", "ddp", f"{changed} {why}", rule, "Leave the [ddp] settings out.")
    if run.has_comm_hook:
        fix = "Leave the hook out, or use dp_replicate for these ranks."
        yield Finding("PL142", "comm_hook", f"comm_hook is given {why}", rule, fix)


def batchnorm_is_there(model: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield `sync_batchnorm` that does not apply: it synchronises over ranks with different samples."""
    if not run.sync_batchnorm:
        return
    if model.has_batchnorm is False:
        yield Finding(
            "PL149",
            "train.sync_batchnorm",
            "train.sync_batchnorm=true for a model without BatchNorm.",
            "It gathers BatchNorm's statistics over all ranks, and this model has none.",
            "Leave sync_batchnorm out.",
        )
    elif layout.dp == 1 and layout.num_ranks > 1:
        yield Finding(
            "PL149",
            "train.sync_batchnorm",
            f"train.sync_batchnorm=true with {name_degrees(layout, shares_data=False)} and one data rank.",
            "It gathers BatchNorm's statistics over "
            f"{' and '.join(list_axes(shares_data=True))}; the other ranks have the same samples.",
            "Leave sync_batchnorm out, or set dp_replicate=2 or more.",
        )
