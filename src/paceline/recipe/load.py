"""From TOML to a `Recipe`, with every problem told in one go."""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from paceline.errors import PacelineError, RecipeErrors
from paceline.recipe.explain import field_at, validate_recipe
from paceline.recipe.schema import Recipe


def load_recipe(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """Reads and validates a recipe file.

    Args:
        path: the TOML file.
        settings: `"key=value"` texts (`train.steps=100`) that override the file; values are TOML,
            and what is not TOML is taken as a string. `none` leaves an optional key out.

    Raises:
        PacelineError: PL120 missing, PL121 unreadable, PL122 not TOML, PL123 malformed setting.
        RecipeErrors: everything wrong with its keys and values.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.glob("*.toml")], n=3, cutoff=0.7
        )
        hint = "Give the path of a .toml file, for example recipes/gpt-stdlib.toml."
        if near:
            hint = f"Did you mean {' or '.join(str(path.parent / name) for name in near)}?"
        raise PacelineError(
            "PL120", saw=f"{path} does not exist.", rule="A run starts from a recipe file.", fix=hint
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PacelineError(
            "PL121",
            saw=f"{path} can't be read: {error}.",
            rule="A recipe is a readable UTF-8 text file.",
            fix="Check the path and its permissions.",
        ) from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PacelineError(
            "PL122",
            saw=f"{path} is not TOML: {error}.",
            rule="A recipe is a TOML file.",
            fix='Mend that place; strings need quotes: kind = "gpt".',
        ) from None
    return parse_recipe(table, settings, where=str(path))


def parse_recipe(table: dict[str, Any], settings: Sequence[str] = (), *, where: str = "recipe") -> Recipe:
    """Validates a recipe given as nested dicts; see `load_recipe`."""
    table = copy.deepcopy(table)
    for setting in settings:
        _override(table, setting)
    if isinstance(table.get("optimizer"), dict):
        table["optimizer"].setdefault("kind", "adamw")
    recipe, problems = validate_recipe(table)
    if recipe is None:
        raise RecipeErrors(where, problems)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as TOML: every key, defaults included (TOML has no null: such keys are left
    out, and reading the text back gives an equal recipe)."""
    table = recipe.model_dump(mode="json", exclude_none=True)
    for section in table.values():
        if "kind" in section:  # first, as a person would write it
            kind = section.pop("kind")
            rest = dict(section)
            section.clear()
            section.update(kind=kind, **rest)
    return tomli_w.dumps(table)


def _override(table: dict[str, Any], setting: str) -> None:
    key, sign, value = setting.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not sign or not all(names):
        raise PacelineError(
            "PL123",
            saw=f"--set {setting!r}.",
            rule="A setting is section.key=value.",
            fix="Write for example --set train.steps=100.",
        )
    for depth, name in enumerate(names[:-1]):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise PacelineError(
                "PL123",
                saw=f"--set {setting!r}, but {'.'.join(names[: depth + 1])} is not a table.",
                rule="A setting is section.key=value.",
                fix="Write for example --set train.steps=100.",
            )
    table[names[-1]] = _parse_value(".".join(names), value.strip())


def _parse_value(key: str, text: str) -> Any:
    field = field_at(key)
    if text == "none" and field is not None and not field.is_required() and field.default is None:
        return None  # TOML has no null, and a key of the file has to be leavable out from here
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if table.keys() == {"value"} else text
