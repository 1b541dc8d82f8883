"""Defines what a run is: typed, validated, from TOML."""

from paceline.recipe.elastic import Settled, settle_recipe
from paceline.recipe.keys import RESUMABLE, SETTINGS, read_arguments
from paceline.recipe.layout import Layout
from paceline.recipe.legal import (
    LayoutErrors,
    Rules,
    check_layout,
    enumerate_layouts,
    nearest,
    refuse_layout,
    remark_layout,
)
from paceline.recipe.load import dump_recipe, load_recipe, parse_recipe
from paceline.recipe.resume import (
    advise_accept,
    check_accepted,
    check_resumable,
    find_key,
    list_changes,
    list_settings,
)
from paceline.recipe.schema import Recipe

__all__ = [
    "RESUMABLE",
    "SETTINGS",
    "Layout",
    "LayoutErrors",
    "Recipe",
    "Rules",
    "Settled",
    "advise_accept",
    "check_accepted",
    "check_layout",
    "check_resumable",
    "dump_recipe",
    "enumerate_layouts",
    "find_key",
    "list_changes",
    "list_settings",
    "load_recipe",
    "nearest",
    "parse_recipe",
    "read_arguments",
    "refuse_layout",
    "remark_layout",
    "settle_recipe",
]
