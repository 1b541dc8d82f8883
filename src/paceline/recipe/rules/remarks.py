"""Remarks on legal layouts that work and may surprise."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.finding import Finding
from paceline.recipe.axes import list_axes
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.recipe.layout import CHOICES, Layout
from paceline.recipe.rules.words import list_changed


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
            f"{layout.dp} data ranks.",
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


def experts_are_repeated(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield cp above ep: a mixture gets whole sequences, and ranks with the same experts repeat them."""
    if model.num_experts and layout.cp > layout.ep:
        yield Finding(
            "PL665",
            "layout.cp",
            f"layout.cp={layout.cp} with layout.ep={layout.ep} for a model with mixtures.",
            f"A mixture gets whole sequences, so {layout.cp // layout.ep} ranks of cp compute the same "
            "experts.",
            f"Set ep={layout.cp} if the experts are most of the work: each rank then computes some of them.",
        )


def settings_wait_for_ranks(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield communication settings on one process: they have no effect, and are not refused, so that a recipe
    for a cluster runs on a laptop."""
    changed = ", ".join(filter(None, (list_changed(run.ddp), list_changed(run.shard))))
    if layout.num_ranks == 1 and changed:
        yield Finding(
            "PL152",
            "layout",
            f"{changed} on one rank.",
            "They control how ranks communicate, so they have no effect here.",
            "Leave them if the recipe is also meant for several ranks.",
        )


def settings_wait_for_layouts(
    asked: Layout, run: RunFacts, layout: Layout, kept: RunFacts
) -> Iterator[Finding]:
    """Yield settings that have no effect now, because the layout follows from the number of ranks."""
    waiting = [
        f"layout.{word}={getattr(asked, word)}"
        for word in CHOICES
        if getattr(asked, word) != getattr(layout, word)
    ]
    if layout.num_ranks > 1:  # on one rank, `settings_wait_for_ranks` yields these
        waiting += [list_changed(run.shard)] * (run.shard != kept.shard)
    if waiting:
        yield Finding(
            "PL152",
            "layout",
            f"{', '.join(waiting)} with layout {layout}.",
            "The layout follows from the number of ranks, and these settings need more of them.",
            "Nothing needs to be done.",
        )
