"""The rule for settings of an axis that a layout does not use: they would have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.finding import Finding
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.recipe.layout import Layout
from paceline.recipe.rules.words import list_changed

_PIPELINE = ("schedule", "chunks", "stages")
# Words of a layout, the axis that they belong to, and what they do there.
_WORDS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("sequence",), "tp", "It splits activations along the sequence over the ranks of tp."),
    (("zero",), "dp_shard", "zero selects what dp_shard shards; on one rank, nothing is sharded."),
    (("offload",), "dp_shard", "offload moves the shards of dp_shard; without it there are none."),
    (_PIPELINE, "pp", "They describe how the stages of a pipeline run; without pp there are none."),
    (
        ("cp_by",),
        "cp",
        "It selects how ranks of cp attend to each other; one rank has all positions.",
    ),
)


def settings_have_their_axis(_: ModelFacts, run: RunFacts, layout: Layout) -> Iterator[Finding]:
    """Yield settings of an axis with one rank. One process may have those of shards and pipelines."""
    for words, axis, rule in _WORDS:
        changed = [
            f"layout.{word}={str(value).lower() if isinstance(value, bool) else value}"
            for word in words
            if (value := getattr(layout, word)) != getattr(Layout, word)
        ]
        if changed and getattr(layout, axis) == 1 and (words is not _PIPELINE or layout.num_ranks > 1):
            yield _refuse(f"layout.{words[0]}", " ".join(changed), axis, rule, words)
    if layout.dp_shard == 1 and layout.num_ranks > 1 and (changed_keys := list_changed(run.shard)):
        yield _refuse("shard", changed_keys, "dp_shard", "The settings in [shard] configure dp_shard.")


def _refuse(where: str, changed: str, axis: str, rule: str, words: tuple[str, ...] = ()) -> Finding:
    fix = f"Set {axis}=2 or more, or leave {words[0] if len(words) == 1 else 'them'} out."
    return Finding("PL138", where, f"{changed} with layout.{axis}=1.", rule, fix)
