"""Checks whether a model can fit into this machine at all, before ranks are started for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from paceline.errors import PacelineError
from paceline.plan.model_state import plan_recipe_memory
from paceline.recipe import Layout, Recipe
from paceline.recipe.facts import count_vocab
from paceline.recipe.schema import MaskedTextData, TextData
from paceline.units import format_bytes


def check_memory(recipe: Recipe, layouts: Sequence[Layout]) -> None:
    """Raise PL125 for a model whose state on this machine's ranks together exceeds its memory and swap.

    Ranks with a GPU are not checked, nor are models whose vocabulary only a tokenizer file defines.

    Args:
        recipe: what is trained.
        layouts: resolved; each of them is to run on this machine by itself.
    """
    data = recipe.data
    is_unknown = isinstance(data, TextData | MaskedTextData) and count_vocab(data) is None
    has_gpu = recipe.train.device == "cuda" or any(Path("/dev").glob("nvidia[0-9]*"))
    if (has_gpu and recipe.train.device != "cpu") or is_unknown or recipe.model.kind in ("hf", "own"):
        return
    available = psutil.virtual_memory().total + psutil.swap_memory().total
    for layout in layouts:
        # The plan is that of a whole model; the ranks of pp hold one between them.
        state = layout.num_ranks // layout.pp * plan_recipe_memory(recipe, layout)["after_step"].on_device
        if state > available:
            model = recipe.model
            keys = [key for key in ("layers", "hidden", "blocks", "width") if hasattr(model, key)]
            sizes = [f"model.{key}={getattr(model, key)}" for key in keys]
            raise PacelineError(
                "PL125",
                saw=f"{' '.join(sizes)} takes {format_bytes(state)} for weights, gradients and optimizer "
                f"state on {layout.num_ranks} rank{'s' * (layout.num_ranks > 1)}, and this machine has "
                f"{format_bytes(available)}.",
                rule="All of this must be in memory after a step.",
                fix="Lower these, or divide the model over more machines with layout.dp_shard or layout.tp.",
            )
