"""Reads a `Recipe` from TOML, and reports all problems at once."""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from paceline.errors import PacelineError, RecipeErrors
from paceline.reading import read_file
from paceline.recipe.explain import field_at, validate_recipe
from paceline.recipe.own_sections import spell_out
from paceline.recipe.schema import Recipe
from paceline.signatures import explain_arguments

# A recipe has about a hundred lines, and its own values are nested three deep.
BUILT_IN = Path(__file__).parents[1] / "recipes"
"""The folder of the recipes that come with the package."""
_MOST_BYTES = 1 << 20
_MOST_LEVELS = 16
# Python converts integers of this size to text and to floating point; the schema has narrower bounds.
_MOST_BITS = 1000


@explain_arguments
def load_recipe(
    path: str | Path,
    settings: Sequence[str] = (),
    *,
    remark: Callable[[str], None] | None = None,
) -> Recipe:
    """Read and validate a recipe file.

    If a setting makes the run shorter than the file's warm-up, the warm-up keeps its share of the run.

    Args:
        path: the TOML file, or the name of a built-in recipe, such as `gpt-stdlib`.
        settings: `"key=value"` texts (`train.steps=100`) that override the file; values are TOML,
            and what is not TOML is taken as a string. `none` leaves an optional key out.
        remark: called with a sentence about each value that was adapted to the settings.

    Raises:
        PacelineError: PL121 missing or unreadable, PL122 not TOML, PL123 malformed setting, PL124 a
            value that a recipe cannot hold.
        RecipeErrors: everything wrong with its keys and values.
    """
    path = find_recipe(path)
    table = _parse_toml(path, _read_text(path))
    _shorten_warmup(table, settings, remark)
    return parse_recipe(table, settings, where=str(path))


def find_recipe(path: str | Path) -> Path:
    """Return a recipe's file: the path, or a built-in recipe's where it is the name of one and no file."""
    built_in = BUILT_IN / f"{path}.toml"
    is_name = re.fullmatch(r"[\w-]{1,64}", str(path)) is not None and not Path(path).exists()
    return built_in if is_name and built_in.exists() else Path(path)


def _read_text(path: Path) -> str:
    try:
        data = read_file(path, _MOST_BYTES)
        return data.decode("utf-8-sig")  # Some editors of Windows begin a file with a byte order mark.
    except FileNotFoundError:
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.glob("*.toml")], n=3, cutoff=0.7
        )
        hint = "Give the path of a .toml file, or a name that `paceline recipes` lists."
        if near:
            hint = f"Did you mean {' or '.join(str(path.parent / name) for name in near)}?"
        raise PacelineError(
            "PL121", saw=f"{path} does not exist.", rule="A run starts from a recipe file.", fix=hint
        ) from None
    except OSError as error:
        raise PacelineError(
            "PL121",
            saw=f"{str(path)[-200:]} cannot be read: {error.strerror}.",
            rule="A recipe is a readable UTF-8 text file.",
            fix="Check the path and its permissions.",
        ) from None
    except UnicodeDecodeError as error:
        is_utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        raise PacelineError(
            "PL121",
            saw=f"{path} cannot be read: "
            + ("it begins with the byte order mark of UTF-16." if is_utf16 else f"{error}."),
            rule="A recipe is a readable UTF-8 text file.",
            fix="Save it as UTF-8.",
        ) from None


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, fix = str(error), 'Correct that line; strings need quotes: kind = "gpt".'
    except RecursionError:
        reason, fix = "it nests tables or lists too deeply", f"Nest at most {_MOST_LEVELS} levels."
    except ValueError:  # Python's own limit, against numbers that take minutes to read
        reason, fix = "it holds an integer of thousands of digits", "Write a number of at most 19 digits."
    raise PacelineError(
        "PL122", saw=f"{path} is not TOML: {reason}.", rule="A recipe is a TOML file.", fix=fix
    )


def parse_recipe(table: dict[str, Any], settings: Sequence[str] = (), *, where: str = "recipe") -> Recipe:
    """Validate a recipe given as nested dicts; see `load_recipe`."""
    _check_values(table, where)
    table = copy.deepcopy(table)
    for setting in settings:
        _override(table, setting)
    if isinstance(table.get("optimizer"), dict):
        table["optimizer"].setdefault("kind", "adamw")
    spell_out(table)
    recipe, problems = validate_recipe(table)
    if recipe is None:
        raise RecipeErrors(where, problems)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """Return the resolved recipe as TOML, with every key and its default.

    TOML has no null: such keys are left out, and reading the text back gives an equal recipe."""
    table = recipe.model_dump(mode="json", exclude_none=True)
    for section in table.values():
        if "kind" in section:  # first, as a person would write it
            kind = section.pop("kind")
            rest = dict(section)
            section.clear()
            section.update(kind=kind, **rest)
    return tomli_w.dumps(table)


def _shorten_warmup(
    table: dict[str, Any], settings: Sequence[str], remark: Callable[[str], None] | None
) -> None:
    """Adapt the file's warm-up to a run that settings make shorter than it.

    A warm-up that is itself a setting, or that does not fit the file's own steps, is left to PL117.
    """
    given = dict(_parse_setting(setting) for setting in settings)
    steps, key = given.get(("train", "steps")), ("optimizer", "warmup_steps")
    planned, warmup = (_look_up(table, *name) for name in (("train", "steps"), key))
    is_whole = all(isinstance(number, int) and number > 0 for number in (steps, planned, warmup))
    if not is_whole or key in given or not steps < warmup <= planned:
        return
    shorter = max(1, warmup * steps // planned)
    table["optimizer"]["warmup_steps"] = shorter
    if remark is not None:
        remark(
            f"optimizer.warmup_steps={shorter} instead of {warmup}: the recipe warms up for {warmup} of "
            f"{planned} steps, and this run has train.steps={steps}. To set another number, use --set "
            "optimizer.warmup_steps=N."
        )


def _look_up(table: dict[str, Any], section: str, key: str) -> Any:
    keys = table.get(section)
    return keys.get(key) if isinstance(keys, dict) else None


def _check_values(table: dict[str, Any], where: str) -> None:
    """Raise PL124 for a value that no key of a recipe can have, before anything recurses into it."""
    for name, value, level in _walk(table):
        saw = None
        if level > _MOST_LEVELS:
            saw, fix = f"{name} is nested more than {_MOST_LEVELS} deep", "Remove the inner levels."
        elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
            saw, fix = f"{name} is an integer of {value.bit_length()} bits", "Write a smaller number."
        elif isinstance(value, str) and not _is_plain(value):
            saw = f"{name} has {ascii(value)[:100]}, which is not valid text"
            fix = "Write it in UTF-8, without NUL characters."
        if saw is not None:
            rule = "A recipe holds short tables and lists, 64-bit integers and UTF-8 text."
            raise RecipeErrors(where, [PacelineError("PL124", saw=f"{saw}.", rule=rule, fix=fix)])


def _walk(table: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Yield every key's full name, value and depth; without recursion, which has a limit."""
    waiting: list[tuple[str, Any, int]] = [("", table, 0)]
    while waiting:
        name, value, level = waiting.pop()
        yield name, value, level
        if level > _MOST_LEVELS:
            continue
        if isinstance(value, dict):
            for key, entry in value.items():
                yield name or "the recipe", key, level
                waiting.append((f"{name}.{key}".strip(".")[:60], entry, level + 1))
        elif isinstance(value, list):
            waiting += [(f"{name}[{number}]"[:60], entry, level + 1) for number, entry in enumerate(value)]


def _is_plain(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # bytes of the command line that are not UTF-8
        return False


def _override(table: dict[str, Any], setting: str) -> None:
    names, value = _parse_setting(setting)
    for depth, name in enumerate(names[:-1]):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise _setting_error(setting, f", but {'.'.join(names[: depth + 1])} is not a table")
    table[names[-1]] = value


def _parse_setting(setting: str) -> tuple[tuple[str, ...], Any]:
    """Return a setting's names and value."""
    key, sign, value = setting.partition("=")
    names = tuple(name.strip() for name in key.split("."))
    if not sign or not all(names) or len(names) > _MOST_LEVELS:
        raise _setting_error(setting)
    parsed = _parse_value(".".join(names), value.strip())
    _check_values({key: parsed}, "--set")
    return names, parsed


def _setting_error(setting: str, but: str = "") -> PacelineError:
    return PacelineError(
        "PL123",
        saw=f"--set {setting[:100]!r}{but}.",
        rule="A setting is section.key=value.",
        fix="Write for example --set train.steps=100.",
    )


def _parse_value(key: str, text: str) -> Any:
    field = field_at(key)
    if text == "none" and field is not None and not field.is_required() and field.default is None:
        return None  # TOML has no null, and a key of the file has to be leavable out from here
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, or more of it than Python takes
        return text
    return table["value"] if table.keys() == {"value"} else text
