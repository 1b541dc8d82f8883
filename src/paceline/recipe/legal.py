"""Decides which layouts work: all reasons against one, the nearest legal ones, and their number.

This needs no torch and no ranks, so that an impossible layout is refused before a process starts. The rules
are in `rules`; `Rules` applies them to a recipe, or to any model whose facts are known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import PacelineError, RecipeErrors
from paceline.finding import Finding
from paceline.recipe.axes import AXES, OPEN, list_axes
from paceline.recipe.facts import ModelFacts, RunFacts, read_facts
from paceline.recipe.layout import CHOICES, Layout, check_ranks
from paceline.recipe.rules import REMARKS, RULES
from paceline.recipe.rules.remarks import settings_wait_for_layouts
from paceline.recipe.rules.words import divisors
from paceline.recipe.schema import Recipe, ShardSection

# The cost of changing a word other than a degree; see `AxisKind.change_cost`.
WORD_DISTANCE = 0.5
_MOST_OFFERED = 3


class LayoutErrors(RecipeErrors):
    """The error with all reasons why a layout does not work, and the nearest layouts that do.

    Args:
        where: the layout and the number of ranks.
        problems: one error per reason.
        nearest: legal layouts on as many ranks, the nearest first.
    """

    def __init__(self, where: str, problems: list[PacelineError], nearest: list[Layout]) -> None:
        super().__init__(where, problems)
        self.nearest = nearest

    def __str__(self) -> str:
        text = super().__str__()
        if not self.nearest:
            return text
        return f"{text}\nNearest that work: {'; '.join(str(layout) for layout in self.nearest)}"

    def __reduce__(self) -> tuple[object, ...]:
        return (LayoutErrors, (self.where, self.problems, self.nearest))


@dataclass(frozen=True)
class Rules:
    """The rules for one model and one run.

    Attributes:
        model: the sizes that layouts have to fit.
        run: what else they are combined with.
    """

    model: ModelFacts
    run: RunFacts

    @classmethod
    def of(cls, recipe: Recipe) -> Rules:
        """Return the rules for a recipe."""
        return cls(*read_facts(recipe))

    def check(self, layout: Layout, world_size: int) -> list[Finding]:
        """Return everything that keeps a layout from working on this number of ranks; empty if it works."""
        found = []
        try:
            resolved, run = self.settle(layout, world_size)
        except PacelineError as error:
            found.append(Finding(error.code, "layout", error.saw, error.rule, error.fix))
            resolved = layout.close()  # the other rules still apply
            run = self._drop_waiting(layout, resolved)
        return found + [finding for rule in RULES for finding in rule(self.model, run, resolved)]

    def remark(self, layout: Layout, world_size: int) -> list[Finding]:
        """Return what works under a legal layout and may surprise."""
        resolved, run = self.settle(layout, world_size)
        found = [finding for rule in REMARKS for finding in rule(self.model, self.run, resolved)]
        return found + list(settings_wait_for_layouts(layout, self.run, resolved, run))

    def settle(self, layout: Layout, world_size: int) -> tuple[Layout, RunFacts]:
        """Return the layout with all degrees known, and the run without settings that wait for more ranks."""
        resolved = layout.resolve(world_size)
        return resolved, self._drop_waiting(layout, resolved)

    def _drop_waiting(self, layout: Layout, resolved: Layout) -> RunFacts:
        return replace(self.run, shard=ShardSection()) if layout.awaits_shards(resolved) else self.run

    def refuse(self, layout: Layout, world_size: int) -> None:
        """Raise for a layout that does not work.

        Raises:
            LayoutErrors: all reasons at once, with the nearest layouts that work.
        """
        check_ranks(world_size)
        found = self.check(layout, world_size)
        if found:
            problems = [PacelineError(f.code, saw=f.saw, rule=f.rule, fix=f.fix) for f in found]
            ranks = f"{world_size} rank{'s' * (world_size != 1)}"
            raise LayoutErrors(f'layout "{layout}" on {ranks}', problems, self.nearest(layout, world_size))

    def nearest(self, layout: Layout, world_size: int) -> list[Layout]:
        """Return a few legal layouts, the most similar first; the layout itself if it is legal.

        Words other than degrees are as requested, or left out.
        """
        recompute, offload, zeros, sequence = (
            sorted({getattr(Layout, word), getattr(layout, word)})
            for word in ("recompute", "offload", "zero", "sequence")
        )
        near = (
            candidate
            for candidate in sorted(
                list_candidates(
                    world_size, recompute, offload, zeros, sequence, has_experts=self._has_experts
                ),
                key=lambda candidate: (_measure_distance(layout, candidate), str(candidate)),
            )
            if candidate != layout and not any(self._break(candidate))
        )
        # Candidates have no words of pp, which a legal layout of one rank may have.
        is_legal = layout.open_axis is None and not self.check(layout, world_size)
        return list(itertools.islice(itertools.chain([layout] * is_legal, near), _MOST_OFFERED))

    def enumerate(
        self, world_size: int, recompute: Sequence[str] = ("none",), offload: Sequence[str] = ("none",)
    ) -> tuple[list[Layout], int]:
        """Return all legal layouts on this number of ranks, and the number of candidates.

        Candidates are the degrees with that product, times every zero and sequence, times the given
        `recompute` and `offload`.
        """
        check_ranks(world_size)
        has_experts = self._has_experts
        candidates = list(list_candidates(world_size, recompute, offload, has_experts=has_experts))
        return [layout for layout in candidates if not any(self._break(layout))], len(candidates)

    @property
    def _has_experts(self) -> bool:
        return self.model.num_experts != 0

    def _break(self, layout: Layout) -> Iterator[Finding]:
        return (finding for rule in RULES for finding in rule(self.model, self.run, layout))


@dataclass(frozen=True)
class Settled:
    """A recipe on a number of ranks.

    Attributes:
        recipe: with all degrees of the layout, and without settings that wait for more ranks.
        layout: with all degrees known.
        remarks: what works and may surprise.
    """

    recipe: Recipe
    layout: Layout
    remarks: tuple[Finding, ...]


def settle_recipe(recipe: Recipe, world_size: int) -> Settled:
    """Fill in the layout of a recipe on a number of ranks; the same on every rank.

    Raises:
        LayoutErrors: if the layout is not legal on them, with all reasons.
    """
    asked, rules = recipe.layout.to_layout(), Rules.of(recipe)
    rules.refuse(asked, world_size)
    layout, run = rules.settle(asked, world_size)
    settled = recipe.with_layout(layout, shard=run.shard)
    return Settled(settled, layout, tuple(rules.remark(asked, world_size)))


def list_candidates(
    world_size: int,
    recompute: Sequence[str],
    offload: Sequence[str],
    zeros: Sequence[int] = tuple(reversed(CHOICES["zero"])),
    sequence: Sequence[bool] = CHOICES["sequence"],
    *,
    has_experts: bool = False,
) -> Iterator[Layout]:
    """Yield every combination of words whose degrees multiply to `world_size`, legal or not.

    Axes within others are combined too if the model may have experts.
    """
    axes = [axis for axis in reversed(list_axes(multiplies=True)) if axis != OPEN]
    candidates = _list_degrees(world_size, axes)
    for degrees in _list_inner(candidates) if has_experts else candidates:
        for words in itertools.product(zeros, sequence, recompute, offload):
            names = ("zero", "sequence", "recompute", "offload")
            chosen: dict[str, Any] = dict(zip(names, words, strict=True))
            yield Layout(**degrees, **chosen)


def _list_degrees(world_size: int, axes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield every choice of degrees for these axes, with the remainder for the open one."""
    if not axes:
        yield {OPEN: world_size}
        return
    for degree in divisors(world_size):
        for others in _list_degrees(world_size // degree, axes[1:]):
            yield {axes[0]: degree, **others}


def _list_inner(candidates: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the degrees with every degree of the axes that are within others."""
    inner = [axis for axis in AXES if axis.within]
    for degrees in candidates:
        choices = [divisors(math.prod(degrees[outer] for outer in axis.within)) for axis in inner]
        for chosen in itertools.product(*choices):
            yield degrees | dict(zip((axis.name for axis in inner), chosen, strict=True))


def _measure_distance(asked: Layout, candidate: Layout) -> float:
    distance = 0.0
    for axis in AXES:
        wanted, found = (getattr(layout, axis.name) for layout in (asked, candidate))
        if wanted is not None:
            distance += axis.change_cost * abs(math.log2(found / wanted))
    for word in CHOICES:
        distance += WORD_DISTANCE * (getattr(asked, word) != getattr(candidate, word))
    return distance
