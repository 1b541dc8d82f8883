"""Reads `foreign_configs.toml`, and says what Paceline has for each key of another tool's file."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Imported:
    """The result of one key of a file."""

    key: str
    value: Any
    state: Literal["mapped", "left out", "refused"]
    says: str
    to: str = ""
    becomes: Any = None


def translate(config: Mapping[str, Any], tool: str) -> list[Imported]:
    """Return what becomes of each key of a file of `tool`: "deepspeed", "accelerate" or "trainer"."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[tool]
    table: dict[str, Row] = {key: row for row in rows for key in row["keys"]}
    return [_judge(key, value, table, lowers=tool == "deepspeed") for key, value in _flatten(config)]


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)  # YAML and hand-written JSON have "1e-4" as text


def _count(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError
    return int(number)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "count": _count,
    "length": lambda steps: max(0, _count(steps)) or None,
    "number": _number,
    "text": str,
    "numbers": lambda value: [float(each) for each in value],
    "degree": lambda size: _count(size) or None,
    "gpus": lambda ids: None if ids == "all" else str(ids),
}


def _judge(key: str, value: Any, table: Mapping[str, Row], *, lowers: bool) -> Imported:
    row = table.get(key) or next((table[each] for each in table if fnmatchcase(key, each)), None)
    if (key.endswith(".enabled") and value is False) or value in ({}, [], None):
        return Imported(key, value, "left out", "it is off, or not set")
    if row is None:
        return Imported(key, value, "refused", "Paceline has nothing like it")
    why, to, values = row.get("why", ""), row.get("to", ""), row.get("values")
    if values is None and "takes" not in row:
        return Imported(key, value, "left out", why)
    if value == "auto":
        return Imported(key, value, "refused", "its number is elsewhere, in TrainingArguments; write it here")
    try:
        word = value.lower() if lowers and isinstance(value, str) else value
        known = {each[0]: each[1] if len(each) > 1 else None for each in values or ()}
        becomes = _KINDS[row["takes"]](value) if values is None else known[word]
    except (KeyError, TypeError, ValueError, OverflowError):
        takes = "" if values is None or row.get("is_refused") else f"known: {', '.join(map(str, known))}"
        says = "; ".join(filter(None, (why, takes))) or "not such a value"
        return Imported(key, value, "refused", says)
    if becomes is None or not to:
        return Imported(key, value, "left out", "it is off" if row.get("is_refused") else "as here")
    return Imported(key, value, "mapped", why, to, becomes)


def _flatten(config: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Return all keys with dots between levels; a section that is switched off is one key."""
    if above and config.get("enabled") is False:
        return [(f"{above}enabled", False)]
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        name = f"{above}{key}"
        is_section = isinstance(value, dict) and value and name.count(".") < 9
        found += _flatten(value, f"{name}.") if is_section else [(name, value)]
    return found
