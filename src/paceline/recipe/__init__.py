"""Defines what a run is: typed, validated, from TOML."""

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
from paceline.recipe.resume import RESUMABLE, check_resumable, list_changes
from paceline.recipe.schema import Recipe

__all__ = [
    "RESUMABLE",
    "Layout",
    "LayoutErrors",
    "Recipe",
    "Rules",
    "check_layout",
    "check_resumable",
    "dump_recipe",
    "enumerate_layouts",
    "list_changes",
    "load_recipe",
    "nearest",
    "parse_recipe",
    "refuse_layout",
    "remark_layout",
]
