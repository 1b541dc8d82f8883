"""Rules for context parallelism: what `cp` divides, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.finding import Finding
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.recipe.layout import Layout
from paceline.recipe.rules.words import divisors, list_numbers, refuse_mixes


def context_divides_heads(model: ModelFacts, _: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield heads that cp and tp together do not divide, and sequences shorter than cp: inside of attention a
    rank has whole sequences of some heads, unless it gathers keys and values."""
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
        if layout.cp_by == "heads" and size is not None and size % ranks and not size % layout.tp:
            given = f"layout.cp={layout.cp}" + (f" with layout.tp={layout.tp}" if layout.tp > 1 else "")
            yield Finding(
                "PL632",
                "layout.cp",
                f"{given} does not divide model.{name}={size}.",
                f"Inside attention, each rank has whole sequences of some of {size // layout.tp} heads, "
                f"so cp must be {list_numbers(divisors(size // layout.tp))}.",
                f"Set cp to one of these, model.{name} to a multiple of {ranks}, or "
                'cp_by="gather", which divides no heads.',
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
    """Yield what cannot be combined with cp in this version."""
    if layout.cp == 1:
        return
    mixes = (
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
    )
    yield from refuse_mixes(f"layout.cp={layout.cp}", mixes)
