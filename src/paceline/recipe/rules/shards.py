"""Rules for sharding and for what saves memory: `dp_shard`, `zero`, `offload`, `recompute` and [shard]."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.finding import Finding
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.recipe.layout import Layout
from paceline.recipe.rules.words import largest_divisor


def offload_moves(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield `offload` without a second memory: it moves shards between two memories."""
    if layout.offload == "cpu" and run.device == "cpu" and layout.dp_shard > 1:
        yield Finding(
            "PL147",
            "layout.offload",
            "layout.offload=cpu on the CPU.",
            "It moves state from GPU memory to CPU memory, where it already is.",
            "Leave it out.",
        )


def recompute_has_blocks(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield `recompute` without blocks: it works block by block."""
    if layout.recompute != "none" and model.num_blocks == 0:
        yield Finding(
            "PL143",
            "layout.recompute",
            f"layout.recompute={layout.recompute} for a model without repeated blocks.",
            "Backward computes the activations inside a block again from the block's input.",
            "Leave recompute out, or put the model's repeated layers into an nn.ModuleList.",
        )


def shards_have_rows(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield parameters with too few rows: `dp_shard` distributes the rows of each parameter."""
    if model.max_rows is not None and layout.dp_shard > model.max_rows:
        yield Finding(
            "PL144",
            "layout.dp_shard",
            f"layout.dp_shard={layout.dp_shard}, but no parameter has more than {model.max_rows} rows.",
            "Each parameter is split by rows, so ranks beyond the last row would hold nothing.",
            f"Set dp_shard={largest_divisor(layout.dp_shard, model.max_rows)} and give the other ranks to "
            "dp_replicate.",
        )


def shard_settings_apply(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield [shard] settings in conflict with `zero` or the run's type."""
    shard = run.shard
    if layout.dp_shard == 1:
        return
    if shard.param_dtype not in ("none", run.dtype):
        yield Finding(
            "PL130",
            "shard.param_dtype",
            f"shard.param_dtype={shard.param_dtype} with train.dtype={run.dtype}.",
            "The model computes in the type that its parameters are gathered in, so both must be the same.",
            f"Set train.dtype={shard.param_dtype}, or leave param_dtype out.",
        )
    narrows = [
        f"shard.{name}={value}"
        for name, value, changes in (
            ("param_dtype", shard.param_dtype, shard.param_dtype != "none"),
            ("reduce_dtype", shard.reduce_dtype, shard.reduce_dtype == "fp32" and run.dtype == "fp64"),
        )
        if changes
    ]
    if narrows and run.reduction == "exact":
        yield Finding(
            "PL148",
            "train.reduction",
            f'{" and ".join(narrows)} with train.reduction="exact".',
            "Exact weights have the same bits on any number of ranks; one process gathers and sums nothing, "
            "so it would not round there.",
            'Leave it out, or set train.reduction="fast".',
        )
