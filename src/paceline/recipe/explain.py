"""Converts pydantic's problems with a recipe to `PacelineError`s: value, rule, next move."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from paceline.errors import PacelineError
from paceline.recipe.schema import Recipe, Section

Location = tuple[int | str, ...]
SectionT = TypeVar("SectionT", bound=Section)


def validate_recipe(table: Mapping[str, Any]) -> tuple[Recipe | None, list[PacelineError]]:
    """Return the recipe, or all that is wrong with it, in the order of the file.

    pydantic checks the rules over several keys only if every single key is good. So the bad keys are removed
    and the rest is checked again, until no new problem is found. Problems that only follow from removing a
    key are not reported.
    """
    rest: dict[str, Any] = {
        section: dict(keys) if isinstance(keys, Mapping) else keys for section, keys in table.items()
    }
    found: dict[str, tuple[tuple[int, ...], PacelineError]] = {}
    taken_out: set[str] = set()
    meant: set[str] = set()  # what unknown keys were probably meant to be
    while True:
        try:
            recipe = Recipe.model_validate(rest)
        except ValidationError as error:
            groups = _group(error)
        else:
            return (None if found else recipe), _in_order(found)
        meant.update(*(_meant(details[0]) for details in groups))
        # A rule that involves a removed or misspelt key may have failed for that reason alone.
        doubtful, before = taken_out | meant, len(taken_out)
        for details in groups:
            names = _names_in(details[0])
            if details[0]["type"] in ("paceline", "missing") and doubtful.intersection(names):
                continue
            problem = _explain(details)
            found.setdefault(str(problem), (_place(table, names[0]), problem))
            taken_out.update(names)
        if len(taken_out) == before:
            return None, _in_order(found)
        for name in taken_out:
            _remove(rest, name)


def validate_section(
    name: str, section: type[SectionT], given: SectionT | Mapping[str, Any] | None
) -> SectionT:
    """Return one validated section by itself, such as `ddp` of a trainer; `None`: the default."""
    if isinstance(given, section):
        return given
    try:
        return section.model_validate(dict(given or {}))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        detail["loc"] = (name, *detail["loc"])
        raise _explain([detail]) from None


def field_at(key: str) -> FieldInfo | None:
    """Return the schema's entry of a key such as `section.key`, the first one if several kinds have it."""
    fields, found = dict(Recipe.model_fields), None
    for name in key.split("."):
        found = fields.get(name)
        models = [] if found is None else models_in(found.annotation)
        fields = {key: field for model in reversed(models) for key, field in model.model_fields.items()}
    return found


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that an annotation means: itself, or the members of a union of kinds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def kind_of(model: type[BaseModel]) -> str | None:
    """Return the `kind` by which a recipe chooses this section, if it is one of several."""
    field = model.model_fields.get("kind")
    kinds = get_args(field.annotation) if field is not None else ()
    return kinds[0] if len(kinds) == 1 else None


def format_value(value: Any) -> str:
    """Return a value as a person writes it in TOML, shortened if it is long."""
    try:
        text = tomli_w.dumps({"v": value}).removeprefix("v = ").strip()
    except (TypeError, ValueError):
        text = repr(value)
    if isinstance(value, Mapping) or "\n" in text:
        text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _in_order(found: dict[str, tuple[tuple[int, ...], PacelineError]]) -> list[PacelineError]:
    return [problem for _, problem in sorted(found.values(), key=lambda entry: entry[0])]


def _meant(detail: ErrorDetails) -> list[str]:
    if detail["type"] != "extra_forbidden":
        return []
    section = _key(detail["loc"]).rpartition(".")[0]
    return [f"{section}.{name}" if section else name for name in _near(detail["loc"])]


def _place(table: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the place of a key in the file; absent keys come last."""
    section, key, *_ = [*name.split("."), ""]
    keys = table.get(section)
    order = list(keys) if isinstance(keys, Mapping) else []
    return (
        list(table).index(section) if section in table else len(table),
        order.index(key) if key in order else len(order),
    )


def _remove(table: dict[str, Any], name: str) -> None:
    section, key, *_ = [*name.split("."), ""]
    if not key:
        # A whole section is removed only if the schema does not know it or does not require it.
        field = Recipe.model_fields.get(section)
        if field is None or not field.is_required():
            table.pop(section, None)
    elif isinstance(table.get(section), dict) and key != "kind":
        table[section].pop(key, None)


def _group(error: ValidationError) -> list[list[ErrorDetails]]:
    """Return problems grouped by key: a value that matches none of several types has one per type."""
    groups: dict[str, list[ErrorDetails]] = {}
    for number, detail in enumerate(error.errors(include_url=False)):
        key = f"{number}" if detail["type"] == "paceline" else _key(detail["loc"])
        groups.setdefault(key, []).append(detail)
    return list(groups.values())


def _key(location: Location) -> str:
    """Return a location's key without names of a union's members.

    `("model", "gpt", "heads")` is `model.heads`, `("optimizer", "adamw", "betas", 1)` is
    `optimizer.betas[1]`, `("islands", "outer", "lr")` is `islands.outer.lr`."""
    parts = _without_kind(location)
    field = field_at(".".join(map(str, parts[:2])))
    is_table = field is not None and bool(models_in(field.annotation))
    named = ".".join(str(part) for part in parts[: 3 if is_table else 2])
    return named + "".join(f"[{part}]" for part in parts[2:] if isinstance(part, int))


def _names_in(detail: ErrorDetails) -> list[str]:
    """Return the keys that a problem is about: its own, or those that a rule over several keys names."""
    if detail["type"] == "paceline":
        return re.findall(r"\b[a-z]+\.[a-z_]+\b", detail["ctx"]["saw"])
    return [_key(detail["loc"]).partition("[")[0]]


def _without_kind(location: Location) -> list[int | str]:
    if len(location) > 1 and str(location[0]) in Recipe.model_fields:
        models = models_in(Recipe.model_fields[str(location[0])].annotation)
        if location[1] in [kind_of(model) for model in models if kind_of(model) is not None]:
            return [location[0], *location[2:]]
    return list(location)


def _explain(details: list[ErrorDetails]) -> PacelineError:
    detail = details[0]
    kind, context, key = detail["type"], detail.get("ctx", {}), _key(detail["loc"])
    if kind == "paceline":
        return PacelineError(context["code"], saw=context["saw"], rule=context["rule"], fix=context["fix"])
    if kind == "extra_forbidden":
        return _explain_unknown(key, detail["loc"])
    if kind == "missing":
        what = f"a [{key}] section" if "." not in key else key
        return PacelineError(
            "PL101", saw=f"{key} is missing.", rule="It has no default.", fix=f"Add {what} to the recipe."
        )
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _explain_kind(key, context)
    if kind in ("model_type", "model_attributes_type"):
        return PacelineError(
            "PL101",
            saw=f"{key}={format_value(detail['input'])}.",
            rule=f"{key} is a table.",
            fix=f"Write [{key}] on its own line and the keys below it, or --set {key}.KEY=VALUE.",
        )
    return PacelineError(
        "PL101",
        saw=f"{key}={format_value(detail['input'])}.",
        rule=f"It should {' or '.join(_rule(one) for one in details)}.",
        fix=_advise(key.partition("[")[0], detail),
    )


def _rule(detail: ErrorDetails) -> str:
    """Return pydantic's sentence without its beginning, to follow "It should"."""
    text = re.sub(r"^(Input|List|Value|String) should ", "", detail["msg"])
    return text.replace(" after validation", "")


def _explain_kind(key: str, context: dict[str, Any]) -> PacelineError:
    kinds = [str(kind_of(model)) for model in models_in(Recipe.model_fields[key].annotation)]
    near = difflib.get_close_matches(str(context.get("tag", "?")), kinds, n=1)
    return PacelineError(
        "PL101",
        saw=f'{key}.kind="{context["tag"]}".' if "tag" in context else f"{key}.kind is missing.",
        rule=f"It is one of {', '.join(kinds)}.",
        fix=f'Did you mean "{near[0]}"?' if near else f'Write for example kind = "{kinds[0]}".',
    )


def _explain_unknown(key: str, location: Location) -> PacelineError:
    near = _near(location)
    elsewhere = [
        f"{section}.{location[-1]}"
        for section in Recipe.model_fields
        if field_at(f"{section}.{location[-1]}")
    ]
    place = f"[{_key(location[:-1])}]" if len(location) > 1 else "A recipe"
    return PacelineError(
        "PL100",
        saw=f"unknown key {key}.",
        rule=f"{place} has {', '.join(_keys_beside(location))}.",
        fix=f'Did you mean "{near[0]}"?' if near else _advise_kind(location) or _offer(elsewhere),
    )


def _offer(keys: list[str]) -> str:
    """Return the next move for a key that other sections have."""
    return f"Did you mean {' or '.join(keys)}?" if keys else "Remove it."


def _advise_kind(location: Location) -> str:
    """Return the next move for a key that the same table has with another `kind`."""
    if len(location) < 2:
        return ""
    models = models_in(Recipe.model_fields[str(location[0])].annotation)
    kinds = [f'kind="{kind_of(model)}"' for model in models if location[-1] in model.model_fields]
    table = f"[{location[0]}]"
    return f"Remove it, or choose {' or '.join(kinds)} in {table}, which has it." if kinds else ""


def _near(location: Location) -> list[str]:
    return difflib.get_close_matches(str(location[-1]), _keys_beside(location), n=1, cutoff=0.5)


def _keys_beside(location: Location) -> list[str]:
    if len(location) == 1:
        return list(Recipe.model_fields)
    table = field_at(_key(location[:-1]))
    assert table is not None
    models = models_in(table.annotation)
    chosen = [model for model in models if kind_of(model) in location[1:-1]] or models
    return list(dict.fromkeys(name for model in chosen for name in model.model_fields))


def _advise(key: str, detail: ErrorDetails) -> str:
    """Return the next move for a key with a bad value, and the key's meaning."""
    name, field = key.rpartition(".")[2], field_at(key)
    if detail["type"] == "list_type" and isinstance(detail["input"], str):
        return f"Write {name} = [{format_value(detail['input'])}]."
    if field is None:
        return f"Fix {key}."
    meaning = " ".join((field.description or "").split())
    if field.is_required():
        move = f"Give {name} such a value"
    elif field.default is None:
        move = f"Give {name} such a value, or leave it out"
    else:
        move = f"Write for example {name} = {format_value(field.default)}, which is the default"
    return f"{move}. ({meaning})" if meaning else f"{move}."
