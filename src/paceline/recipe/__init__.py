"""Defines what a run is: typed, validated, from TOML."""

from paceline.recipe.keys import RESUMABLE, SETTINGS, read_arguments
from paceline.recipe.layout import Layout
from paceline.recipe.legal import LayoutErrors, Rules, Settled, settle_recipe
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
    "check_resumable",
    "dump_recipe",
    "find_key",
    "list_changes",
    "list_settings",
    "load_recipe",
    "parse_recipe",
    "read_arguments",
    "settle_recipe",
]
