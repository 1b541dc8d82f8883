"""Rules for pipelines: what makes stages, and what cannot be combined with `pp`."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.finding import Finding
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.recipe.layout import AS_V, DIVIDED, LOOPING, Layout
from paceline.recipe.rules.words import list_changed, refuse_mixes


def stages_have_blocks(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield more stages than blocks, and words of pp that do not fit each other: a stage begins with a
    block."""
    if layout.pp == 1:
        return
    loops = layout.schedule in LOOPING
    is_fixed = layout.schedule in AS_V and layout.chunks == 2
    num_stages = layout.num_stages
    yield from _check_stages(layout, num_stages)
    if loops != (layout.chunks > 1) and not is_fixed:
        yield Finding(
            "PL475",
            "layout.chunks",
            f"layout.schedule={layout.schedule} with layout.chunks={layout.chunks}.",
            "interleaved and bfs go around the ranks several times, so each rank holds at least 2 stages; "
            "under zbv it holds 2, and under the others 1.",
            "Set chunks=2." if loops else "Leave chunks out, or set schedule=interleaved.",
        )
    if model.num_cuts is not None and num_stages > max(model.num_cuts, 1):
        yield Finding(
            "PL491",
            "layout.pp",
            f"layout.pp={layout.pp} with {num_stages // layout.pp} stages per rank, for a model of "
            f"{model.num_cuts} repeated blocks.",
            f"Each of the {num_stages} stages begins with a block of its own.",
            f"Set pp to at most {max(1, model.num_cuts * layout.pp // num_stages)}, or put the model's "
            "layers into an nn.ModuleList.",
        )


def _check_stages(layout: Layout, num_stages: int) -> Iterator[Finding]:
    """Yield a list of stages of another length than there are stages, or one that is no list."""
    found = layout.stages_by_hand
    if not found:
        return
    if len(found) != num_stages - 1:
        yield Finding(
            "PL497",
            "layout.stages",
            f'layout.stages="{layout.stages}" has {len(found)} names for {num_stages} stages.',
            "Give the first module of every stage but the first.",
            f"Give {num_stages - 1} names.",
        )


def stages_go_with(model: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield what cannot be combined with pp in this version."""
    if layout.pp == 1:
        return
    changed = list_changed(run.shard, besides=frozenset({"prefetch"}))
    mixes = (
        (
            layout.offload != "none",
            "layout.offload",
            f"layout.offload={layout.offload}",
            "A stage keeps its shards in the memory in which it computes.",
            f"Leave offload out, or set pp=1 and dp_shard={layout.pp * layout.dp_shard}.",
        ),
        (
            layout.dp_shard > 1 and bool(changed),
            "shard",
            changed,
            "A stage is gathered as a whole, in the type of the model; prefetch is the only setting of "
            "[shard] that it supports.",
            "Leave these settings out, or set pp=1.",
        ),
        (
            run.compile and layout.schedule in DIVIDED,
            "train.compile",
            f"train.compile=true and layout.schedule={layout.schedule}",
            "A divided backward holds back gradients of single layers, which is not possible in compiled "
            "code.",
            "Leave compile out, or set schedule=1f1b.",
        ),
        (
            run.compile and layout.recompute != "none",
            "train.compile",
            f"train.compile=true and layout.recompute={layout.recompute}",
            "The second forward of a compiled block saves other tensors than the first one.",
            "Leave compile or recompute out.",
        ),
        (
            run.compile and layout.tp > 1,
            "train.compile",
            f"train.compile=true and layout.tp={layout.tp}",
            "tp follows the functions inside of a stage's blocks, which is not possible in compiled code.",
            f"Leave compile out, or set tp=1 and dp_shard={layout.dp_shard * layout.tp}.",
        ),
    )
    yield from refuse_mixes(f"layout.pp={layout.pp}", mixes)
    if layout.schedule in DIVIDED and layout.recompute != "none":
        yield Finding(
            "PL478",
            "layout.recompute",
            f"layout.recompute={layout.recompute} with layout.schedule={layout.schedule}.",
            "The schedule computes gradients of weights later, from activations that recompute drops.",
            "Leave recompute out, or set schedule=1f1b.",
        )
