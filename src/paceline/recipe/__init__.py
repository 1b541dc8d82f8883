"""What a run is: typed, validated, from TOML."""

from paceline.recipe.layout import Layout
from paceline.recipe.load import dump_recipe, load_recipe, parse_recipe
from paceline.recipe.resume import RESUMABLE, check_resumable, list_changes
from paceline.recipe.schema import Recipe

__all__ = [
    "RESUMABLE",
    "Layout",
    "Recipe",
    "check_resumable",
    "dump_recipe",
    "list_changes",
    "load_recipe",
    "parse_recipe",
]
