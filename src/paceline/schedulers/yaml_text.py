"""Writes nested dicts and lists as YAML, for files that a person reads; without a library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Words that YAML readers take for something other than text are quoted.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def dump_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return documents of dicts, lists, strings, whole numbers and bools as YAML; long strings as blocks."""
    return "---\n".join("\n".join(_write(document, "")) + "\n" for document in documents)


def _write(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _write_entry(f"{indent}{key}:", inner, indent + "  ")
    else:
        for inner in value:
            lines = list(_write_entry(f"{indent}-", inner, indent + "  "))
            if isinstance(inner, Mapping) and inner:
                lines = [f"{indent}- {lines[1].lstrip()}", *lines[2:]]
            yield from lines


def _write_entry(start: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, str) and "\n" in value:
        yield f"{start} |"
        yield from (f"{indent}{line}".rstrip() for line in value.splitlines())
    elif isinstance(value, Mapping | list) and value:
        yield start
        yield from _write(value, indent)
    else:
        yield f"{start} {_write_scalar(value)}"


def _write_scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return json.dumps(value)
