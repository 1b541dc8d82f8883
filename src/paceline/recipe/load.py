"""From TOML to a `Recipe`, with every problem told in one go."""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from paceline.errors import PacelineError, RecipeErrors
from paceline.recipe.layout import AXES
from paceline.recipe.schema import Recipe


def load_recipe(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """Reads and validates a recipe file.

    Args:
        path: the TOML file.
        settings: `"key=value"` texts (`train.steps=100`) that override the file; values are TOML,
            and what is not TOML is taken as a string.

    Raises:
        PacelineError: PL120 missing, PL121 unreadable, PL122 not TOML, PL123 malformed setting.
        RecipeErrors: everything wrong with its keys and values.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=3)
        hint = f"Did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else (
            "Give the path of a .toml file, for example recipes/gpt-stdlib.toml."
        )
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
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        problems = [_explain(detail) for detail in error.errors(include_url=False)]
        raise RecipeErrors(where, problems) from None


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
    table[names[-1]] = _parse_value(value.strip())


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(detail: ErrorDetails) -> PacelineError:
    """One problem of pydantic's as value, rule and next move."""
    location, kind = detail["loc"], detail["type"]
    context = detail.get("ctx", {})
    key = ".".join(str(part) for part in _without_tags(location))
    if kind == "paceline":
        return PacelineError(context["code"], saw=context["saw"], rule=context["rule"], fix=context["fix"])
    if kind == "extra_forbidden":
        return _explain_unknown(key, location)
    if kind == "missing":
        return PacelineError(
            "PL101", saw=f"{key} is missing.", rule="It has no default.", fix=f"Add {key} to the recipe."
        )
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = context.get("expected_tags", "")
        near = difflib.get_close_matches(str(context.get("tag", "?")), tags.replace("'", "").split(", "), n=1)
        saw = f"{key}.kind={context['tag']!r}." if "tag" in context else f"{key}.kind is missing."
        return PacelineError(
            "PL101",
            saw=saw,
            rule=f"It is one of {tags or _kinds(key)}.",
            fix=f'Did you mean "{near[0]}"?' if near else "Choose one of these.",
        )
    rule = detail["msg"].replace("Input should", "It should")
    return PacelineError(
        "PL101", saw=f"{key}={detail['input']!r}.", rule=f"{rule}.", fix=_advice(key)
    )


def _explain_unknown(key: str, location: tuple[int | str, ...]) -> PacelineError:
    name = str(location[-1])
    if location[0] == "layout" and name in AXES:
        return PacelineError(
            "PL111",
            saw=f"{key} is set.",
            rule="This version lays out dp_replicate only.",
            fix=f"Leave {name} out and use dp_replicate for all ranks.",
        )
    known = _fields_at(location[:-1])
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    place = f"[{_without_tags(location)[0]}]" if len(location) > 1 else "A recipe"
    return PacelineError(
        "PL100",
        saw=f"unknown key {key}.",
        rule=f"{place} has {', '.join(known)}.",
        fix=f'Did you mean "{near[0]}"?' if near else "Remove it.",
    )


def _advice(key: str) -> str:
    field = _field(key)
    doc = " ".join((field.description or "").split()) if field is not None else ""
    return f"{key}: {doc}" if doc else f"Mend {key}."


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that an annotation stands for: itself, or the members of a union of kinds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _kind_of(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("kind")
    return get_args(field.annotation)[0] if field is not None else None


def _kinds(section: str) -> str:
    models = _models_in(Recipe.model_fields[section].annotation)
    return ", ".join(repr(_kind_of(model)) for model in models)


def _sections_at(location: tuple[int | str, ...]) -> list[type[BaseModel]]:
    if not location:
        return [Recipe]
    models = _models_in(Recipe.model_fields[str(location[0])].annotation)
    tags = [str(part) for part in location[1:]]
    return [model for model in models if not tags or _kind_of(model) in tags] or models


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    return list(dict.fromkeys(name for model in _sections_at(location) for name in model.model_fields))


def _field(key: str) -> FieldInfo | None:
    section, _, name = key.partition(".")
    if section not in Recipe.model_fields:
        return None
    for model in _models_in(Recipe.model_fields[section].annotation):
        if name.split(".")[0] in model.model_fields:
            return model.model_fields[name.split(".")[0]]
    return None


def _without_tags(location: tuple[int | str, ...]) -> list[int | str]:
    """Drops the kind that pydantic puts into the path of a union: model.gpt.heads is model.heads."""
    if len(location) > 1 and str(location[0]) in Recipe.model_fields:
        models = _models_in(Recipe.model_fields[str(location[0])].annotation)
        if location[1] in [_kind_of(model) for model in models if _kind_of(model) is not None]:
            return [location[0], *location[2:]]
    return list(location)
