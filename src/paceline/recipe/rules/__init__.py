"""The rules for legal layouts, each defined once: a function per rule, which yields what breaks it.

A rule reads facts and a layout whose degrees are all known. It yields a `Finding` with the value, the rule
and the next move for whatever breaks it. `RULES` refuse; `REMARKS` report what works and may surprise. A file
has the rules of one family of axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.finding import Finding
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.recipe.layout import Layout
from paceline.recipe.rules.context import (
    context_divides_heads,
    context_goes_with,
)
from paceline.recipe.rules.experts import (
    experts_are_there,
    experts_divide_data_ranks,
    experts_go_with,
)
from paceline.recipe.rules.remarks import (
    exact_bits_depend_on_axes,
    experts_are_repeated,
    ranks_are_idle,
    settings_wait_for_ranks,
    vocabulary_stays_whole,
)
from paceline.recipe.rules.replicas import replication_applies
from paceline.recipe.rules.shards import (
    offload_moves,
    recompute_has_blocks,
    shard_settings_apply,
    shards_have_rows,
)
from paceline.recipe.rules.stages import stages_go_with, stages_have_blocks
from paceline.recipe.rules.tensor import sequence_is_divided, tp_divides_sizes, tp_has_matrices
from paceline.recipe.rules.unused import settings_have_their_axis

Rule = Callable[[ModelFacts, RunFacts, Layout], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    tp_has_matrices,
    tp_divides_sizes,
    sequence_is_divided,
    settings_have_their_axis,
    offload_moves,
    recompute_has_blocks,
    shards_have_rows,
    shard_settings_apply,
    replication_applies,
    stages_have_blocks,
    stages_go_with,
    context_divides_heads,
    context_goes_with,
    experts_are_there,
    experts_divide_data_ranks,
    experts_go_with,
)

REMARKS: tuple[Rule, ...] = (
    vocabulary_stays_whole,
    ranks_are_idle,
    exact_bits_depend_on_axes,
    experts_are_repeated,
    settings_wait_for_ranks,
)
