"""The rules for legal layouts, each defined once: a function per rule, which yields what breaks it.

A rule reads facts and a layout whose degrees are all known. It yields a `Finding` with the value, the rule
and the next move for whatever breaks it. `RULES` refuse; `REMARKS` report what works and may surprise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from math import gcd
from typing import Any

from pydantic import BaseModel

from paceline.finding import Finding
from paceline.recipe.axes import list_axes
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.recipe.layout import AS_V, DIVIDED, LOOPING, Layout

# The one key of [shard] with a rule of its own.
FOLDER = frozenset({"offload_folder"})

Rule = Callable[[ModelFacts, RunFacts, Layout], Iterator[Finding]]


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


def tp_divides_heads(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield heads that tp does not divide: a head is computed on one rank."""
    for code, name, size, whole in (
        ("PL132", "heads", model.heads, "whole heads"),
        ("PL133", "kv_heads", model.kv_heads, "whole key and value heads with the query heads that use them"),
    ):
        if name == "kv_heads" and size == model.heads:
            continue  # Reported already.
        if size is not None and size % layout.tp != 0:
            yield Finding(
                code,
                "layout.tp",
                f"layout.tp={layout.tp} does not divide model.{name}={size}.",
                f"Each rank holds {whole}, so tp must be {_list(divisors(size))}.",
                _choose_tp(model, f"model.{name}", layout.tp),
            )


def tp_divides_widths(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield widths that tp does not divide: each rank holds an equal range of features between two
    matrices."""
    for name, size in model.inner:
        if size % layout.tp != 0:
            yield Finding(
                "PL134",
                "layout.tp",
                f"layout.tp={layout.tp} does not divide {name}={size}.",
                "Each rank holds an equal part of the features between the two matrices.",
                _choose_tp(model, name, layout.tp),
            )


def sequence_has_tp(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield `sequence` without tp, or unequal parts: the ranks of tp share the sequence equally."""
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
    if layout.tp == 1:
        yield Finding(
            "PL136",
            "layout.sequence",
            f"layout.sequence=true with layout.tp={layout.tp}.",
            "Activations are split along the sequence over the ranks of tp; with one rank there is nothing "
            "to split.",
            "Set tp=2 or more, or leave sequence out.",
        )
    elif model.seq_len is not None and model.seq_len % layout.tp != 0:
        low = model.seq_len // layout.tp * layout.tp
        yield Finding(
            "PL137",
            "layout.sequence",
            f"layout.sequence=true with layout.tp={layout.tp}, which does not divide "
            f"data.seq_len={model.seq_len}.",
            "Each rank holds an equal part of the sequence.",
            f"Set data.seq_len={low or layout.tp} or {low + layout.tp}, or leave sequence out.",
        )


def zero_has_shards(_: ModelFacts, __: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield `zero` without shards: it selects what `dp_shard` shards."""
    if layout.zero != Layout.zero and layout.dp_shard == 1:
        yield Finding(
            "PL138",
            "layout.zero",
            f"layout.zero={layout.zero} with layout.dp_shard=1.",
            "zero selects what dp_shard shards; on one rank, nothing is sharded.",
            f"Set dp_shard=2 or more, or leave zero out (={Layout.zero}).",
        )


def offload_has_shards(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield `offload` without shards or a second memory: it moves shards between two memories."""
    if layout.offload != "none" and layout.dp_shard == 1:
        yield Finding(
            "PL139",
            "layout.offload",
            f"layout.offload={layout.offload} with layout.dp_shard=1.",
            "offload moves the shards of dp_shard; without it there are none.",
            "Set dp_shard=2 or more, or leave offload out.",
        )
    if layout.offload == "cpu" and run.device == "cpu":
        yield Finding(
            "PL147",
            "layout.offload",
            "layout.offload=cpu on the CPU.",
            "It moves state from GPU memory to CPU memory, where it already is.",
            "Use offload=disk, or leave it out.",
        )
    if layout.offload != "disk" and run.shard.offload_folder is not None:
        yield Finding(
            "PL146",
            "shard.offload_folder",
            f'shard.offload_folder="{run.shard.offload_folder}" with layout.offload={layout.offload}.',
            "The folder is only used for the files of offload=disk.",
            "Set offload=disk, or leave the folder out.",
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
    """Yield [shard] settings without shards, or in conflict with `zero` or the run's type."""
    shard = run.shard
    if layout.dp_shard == 1:
        changed = list_changed(shard, besides=FOLDER)
        if changed and layout.num_ranks > 1:
            yield Finding(
                "PL140",
                "shard",
                f"{changed} with layout.dp_shard=1.",
                "The settings in [shard] configure dp_shard, which is not used here.",
                "Set dp_shard=2 or more, or leave them out.",
            )
        return
    if shard.reshard_after_forward is True and layout.zero < 3:
        yield Finding(
            "PL145",
            "shard.reshard_after_forward",
            f"shard.reshard_after_forward=true with layout.zero={layout.zero}.",
            "Only zero=3 shards parameters; 1 and 2 keep them whole from a step's first forward to its last "
            "backward.",
            'Set zero=3, or reshard_after_forward="auto".',
        )
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


def stages_have_blocks(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield more stages than blocks, and words of pp that do not fit each other: a stage begins with a
    block."""
    if layout.pp == 1:
        changed = [
            f"layout.{word}={getattr(layout, word)}"
            for word in ("schedule", "chunks", "stages")
            if getattr(layout, word) != getattr(Layout, word)
        ]
        if changed and layout.num_ranks > 1:
            yield Finding(
                "PL490",
                "layout.schedule",
                f"{' '.join(changed)} with layout.pp=1.",
                "They say how the stages of a pipeline run; without pp there are none.",
                "Set pp=2 or more, or leave them out.",
            )
        return
    loops = layout.schedule in LOOPING
    is_fixed = layout.schedule in AS_V and layout.chunks == 2
    num_stages = layout.num_stages
    if num_stages is None:
        if layout.chunks > 1:
            yield Finding(
                "PL475",
                "layout.chunks",
                f"layout.chunks={layout.chunks} with layout.schedule={layout.schedule}.",
                "The list in the file says which rank holds which stages.",
                "Leave chunks out.",
            )
        return
    yield from _check_stages(layout, num_stages)
    if loops != (layout.chunks > 1) and not is_fixed:
        yield Finding(
            "PL475",
            "layout.chunks",
            f"layout.schedule={layout.schedule} with layout.chunks={layout.chunks}.",
            "interleaved and bfs go around the ranks several times, so each rank holds at least 2 stages; "
            "under zbv and dualpipev it holds 2, and under the others 1.",
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
    expected = num_stages if isinstance(found[0], int) else num_stages - 1
    if len(found) != expected:
        what = "numbers of blocks" if isinstance(found[0], int) else "names"
        yield Finding(
            "PL497",
            "layout.stages",
            f'layout.stages="{layout.stages}" has {len(found)} {what} for {num_stages} stages.',
            "Give the number of blocks of every stage, or the first module of every stage but the first.",
            f"Give {num_stages} numbers, or {num_stages - 1} names.",
        )


def stages_go_with(model: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield what pp does not go with in this version."""
    if layout.pp == 1:
        return
    has = f"layout.pp={layout.pp} with "
    changed = list_changed(run.shard, besides=frozenset({"prefetch"}))
    for is_there, key, saw, rule, fix in (
        (
            layout.offload != "none",
            "layout.offload",
            f"layout.offload={layout.offload}",
            "A stage keeps its shards in the memory in which it computes.",
            "Leave offload out.",
        ),
        (
            layout.dp_shard > 1 and bool(changed),
            "shard",
            changed,
            "A stage is gathered as a whole, in the type of the model; of [shard] it knows prefetch alone.",
            "Leave these settings out.",
        ),
        (
            run.sync_batchnorm,
            "train.sync_batchnorm",
            "train.sync_batchnorm=true",
            "Its collectives would be in the middle of a stage's work.",
            "Leave it out: statistics are then per microbatch, the same on every layout.",
        ),
        (
            run.compile,
            "train.compile",
            "train.compile=true",
            "A stage runs a part of the model's forward, which a compiled forward does not have.",
            "Leave compile out.",
        ),
    ):
        if is_there:
            yield Finding("PL492", key, f"{has}{saw}.", f"{rule} This version has no other way.", fix)
    if layout.schedule in DIVIDED and layout.recompute != "none":
        yield Finding(
            "PL478",
            "layout.recompute",
            f"layout.recompute={layout.recompute} with layout.schedule={layout.schedule}.",
            "The schedule computes gradients of weights later, from activations that recompute drops.",
            "Leave recompute out, or set schedule=1f1b.",
        )


def context_divides_heads(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield heads that cp and tp together do not divide, and sequences shorter than cp: inside of attention a
    rank has whole sequences of some heads."""
    if layout.cp == 1:
        return
    if not model.splits:
        yield Finding(
            "PL632",
            "layout.cp",
            f"layout.cp={layout.cp} for a model without attention.",
            "cp divides sequences between blocks with attention; this model has none.",
            f"Set cp=1 and give its {layout.cp} ranks to dp_replicate or dp_shard.",
        )
    ranks = layout.cp * layout.tp
    for name, size in (("heads", model.heads), ("kv_heads", model.kv_heads)):
        if name == "kv_heads" and size == model.heads:
            continue  # Reported already.
        if size is not None and size % ranks and not size % layout.tp:
            given = f"layout.cp={layout.cp}" + (f" with layout.tp={layout.tp}" if layout.tp > 1 else "")
            yield Finding(
                "PL632",
                "layout.cp",
                f"{given} does not divide model.{name}={size}.",
                f"Inside of attention each rank has whole sequences of some of {size // layout.tp} heads, "
                f"so cp must be {_list(divisors(size // layout.tp))}.",
                f"Set cp to one of these, or model.{name} to a multiple of {ranks}.",
            )
    if model.seq_len is not None and model.seq_len < layout.cp:
        yield Finding(
            "PL631",
            "layout.cp",
            f"layout.cp={layout.cp} with data.seq_len={model.seq_len}.",
            "Every rank of cp has at least one position of each sequence.",
            f"Set cp to at most {model.seq_len}.",
        )


def context_goes_with(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield what cp does not go with in this version."""
    if layout.cp == 1:
        return
    has = f"layout.cp={layout.cp} with "
    for is_there, key, saw, rule, fix in (
        (
            layout.pp > 1,
            "layout.pp",
            f"layout.pp={layout.pp}",
            "A stage of a pipeline passes on whole sequences.",
            f"Set pp=1 and cp={layout.cp * layout.pp}, or cp=1 and pp={layout.cp * layout.pp}.",
        ),
        (
            layout.tp > 1,
            "layout.tp",
            f"layout.tp={layout.tp}",
            "Both would change the same calls of an attention.",
            f"Set tp=1 and cp={layout.cp * layout.tp}, or cp=1 and tp={layout.cp * layout.tp}.",
        ),
        (
            layout.sequence,
            "layout.sequence",
            "layout.sequence=true",
            "cp divides the same activations along the same dimension already.",
            "Leave sequence out.",
        ),
        (
            run.compile,
            "train.compile",
            "train.compile=true",
            "The compiler cannot read the positions in the source by which cp recognises calls.",
            "Leave compile out.",
        ),
    ):
        if is_there:
            yield Finding("PL633", key, f"{has}{saw}.", f"{rule} This version has no other way.", fix)


def replication_applies(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield settings of DDP without DDP: it replicates only if dp_shard does not share out data too."""
    if layout.num_ranks == 1 or (layout.dp_shard == 1 and layout.num_replicas > 1 and layout.pp == 1):
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
            f"train.sync_batchnorm=true with {name_degrees(layout, shares_data=False)} and one rank of data.",
            "It gathers BatchNorm's statistics over "
            f"{' and '.join(list_axes(shares_data=True))}; the other ranks have the same samples.",
            "Leave sync_batchnorm out, or set dp_replicate=2 or more.",
        )


RULES: tuple[Rule, ...] = (
    tp_has_matrices,
    tp_divides_heads,
    tp_divides_widths,
    sequence_has_tp,
    zero_has_shards,
    offload_has_shards,
    recompute_has_blocks,
    shards_have_rows,
    shard_settings_apply,
    replication_applies,
    batchnorm_is_there,
    stages_have_blocks,
    stages_go_with,
    context_divides_heads,
    context_goes_with,
)


def vocabulary_stays_whole(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield a vocabulary that tp does not divide: an embedding is split by rows, equally over all ranks."""
    if model.splits and model.vocab_size is not None and model.vocab_size % layout.tp != 0:
        yield Finding(
            "PL150",
            "layout.tp",
            f"layout.tp={layout.tp} does not divide the vocabulary of {model.vocab_size}.",
            "The embedding, the logits and the loss stay whole on every rank of tp, which takes more memory "
            "and time.",
            f"A vocabulary of {-(-model.vocab_size // layout.tp) * layout.tp} could be split.",
        )


def ranks_are_idle(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield too few microbatches: data ranks share out whole ones."""
    if run.num_microbatches is not None and run.num_microbatches < layout.dp:
        sharded = " (with dp_shard they still take part in every forward)" if layout.dp_shard > 1 else ""
        yield Finding(
            "PL131",
            "layout",
            f"a global batch of {run.num_microbatches} microbatch{'es' * (run.num_microbatches != 1)} for "
            f"{layout.dp} ranks of data.",
            f"Each microbatch is computed by one rank, so {layout.dp - run.num_microbatches} compute "
            f"nothing{sharded}.",
            "Lower train.microbatch_size or raise train.global_batch_size (both change the run), or use "
            "fewer ranks.",
        )


def exact_bits_depend_on_axes(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield axes that change bits: some, such as tp, add within a sample's computation in their own order."""
    changing = layout.list_several(keeps_bits=False) if run.reduction == "exact" else {}
    for axis, degree in changing.items():
        yield Finding(
            "PL151",
            f"layout.{axis}",
            f'layout.{axis}={degree} with train.reduction="exact".',
            f"Weights have the same bits under any {', '.join(list_axes(keeps_bits=True))} and zero, but "
            f"not under another {axis}, because a sum that is split over ranks has another order.",
            f"Compare hashes only among layouts with the same {axis}; nothing else needs to be done.",
        )


def settings_wait_for_ranks(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield communication settings on one process: they have no effect, and are not refused, so that a recipe
    for a cluster runs on a laptop.
    a recipe for a cluster runs on a laptop."""
    changed = ", ".join(filter(None, (list_changed(run.ddp), list_changed(run.shard, besides=FOLDER))))
    if layout.num_ranks == 1 and changed:
        yield Finding(
            "PL152",
            "layout",
            f"{changed} on one rank.",
            "They control how ranks communicate, so they have no effect here.",
            "Leave them if the recipe is also meant for several ranks.",
        )


REMARKS: tuple[Rule, ...] = (
    vocabulary_stays_whole,
    ranks_are_idle,
    exact_bits_depend_on_axes,
    settings_wait_for_ranks,
)


def name_degrees(layout: Layout, **facts: bool) -> str:
    """Return the degrees above 1 of the axes with these properties, as `layout.tp=2`."""
    return " ".join(f"layout.{axis}={degree}" for axis, degree in layout.list_several(**facts).items())


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`."""
    return max(n for n in divisors(number) if n <= limit)


def list_changed(section: BaseModel, besides: frozenset[str] = frozenset()) -> str:
    """Return the keys of a section that are not at their defaults, as `ddp.static_graph=true, ...`."""
    name = type(section).__name__.removesuffix("Section").lower()
    default: Any = type(section)()
    changed = {
        key: getattr(section, key)
        for key in type(section).model_fields
        if key not in besides and getattr(section, key) != getattr(default, key)
    }
    return ", ".join(
        f"{name}.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in changed.items()
    )


def _choose_tp(model: ModelFacts, name: str, tp: int) -> str:
    """Return the next move if tp divides one size but not another: the degrees that divide all."""
    sizes = [size for size in (model.heads, model.kv_heads, *(s for _, s in model.inner)) if size is not None]
    choices = divisors(reduce(gcd, sizes))
    near = sorted(sorted(choices, key=lambda n: (max(n / tp, tp / n), n))[:4])
    divide = "divide" if len(near) > 1 else "divides"
    return f"Set tp to {_list(near)}, which {divide} all that is split, or {name} to a multiple of {tp}."


def _list(numbers: list[int]) -> str:
    """Return numbers in words, `1, 2 or 4`; of many, the first and the last."""
    if len(numbers) > 12:
        numbers = [*numbers[:10], numbers[-1]]
    texts = [str(n) for n in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
