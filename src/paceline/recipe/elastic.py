"""Chooses the layout of a run by the number of ranks that are there.

`[layout]` is the first choice, unless it is left at its defaults. `[elastic] layouts` lists the others, in
order. The first layout that the ranks can hold is used; ranks beyond it are spares. Without `[elastic]
layouts`, every rank has a place in `[layout]`, or the run is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.recipe.layout import Layout, check_ranks
from paceline.recipe.legal import Rules
from paceline.recipe.schema import Recipe


@dataclass(frozen=True)
class Settled:
    """A recipe on a number of ranks.

    Attributes:
        recipe: with the chosen layout and no other, and without settings that wait for another layout.
        layout: the chosen one, with all degrees known.
        num_spares: ranks beyond the layout's.
        remarks: what works and may surprise.
    """

    recipe: Recipe
    layout: Layout
    num_spares: int
    remarks: tuple[Finding, ...]


def settle_recipe(recipe: Recipe, world_size: int) -> Settled:
    """Choose the layout of a recipe on a number of ranks; the same on every rank.

    Raises:
        PacelineError: PL126 for too many ranks, PL129 if no layout fits into them.
        LayoutErrors: if the layout, or one of `[elastic] layouts`, is not legal; with all reasons.
    """
    check_ranks(world_size)
    layouts, rules = recipe.list_layouts(), Rules.of(recipe)
    asked, num_ranks = layouts[0], world_size
    if recipe.elastic.layouts:
        for layout in layouts:
            rules.refuse(layout, layout.fewest_ranks)
        asked, num_ranks = _choose(layouts, world_size)
    rules.refuse(asked, num_ranks)
    layout, run = rules.settle(asked, num_ranks)
    settled = recipe.with_layout(layout, shard=run.shard, ddp=run.ddp)
    return Settled(settled, layout, world_size - num_ranks, tuple(rules.remark(asked, num_ranks)))


def count_places(layout: Layout, world_size: int) -> int:
    """Return the largest number of ranks up to `world_size` that a layout can have; 0 if it needs more."""
    least = layout.fewest_ranks
    if world_size < least:
        return 0
    return least if layout.open_axis is None else world_size // least * least


def _choose(layouts: list[Layout], world_size: int) -> tuple[Layout, int]:
    for layout in layouts:
        places = count_places(layout, world_size)
        if places:
            return layout, places
    least = min(layout.fewest_ranks for layout in layouts)
    names = " or ".join(f'"{layout}"' for layout in layouts)
    raise PacelineError(
        "PL129",
        saw=f"{world_size} rank{'s' * (world_size != 1)} for {names}.",
        rule="A run uses the first of its layouts for which it has enough ranks; the smallest needs "
        f"{least}.",
        fix=f"Start at least {least} ranks (the MIN of --nnodes MIN:MAX, times the ranks of a node), or add "
        "a smaller layout to elastic.layouts.",
    )
