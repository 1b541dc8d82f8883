"""Checks an object of Kubernetes against a schema of `schemas/`; every field that a schema lacks is a fault.

The schemas are JSON Schema, of which this reads: type, properties, required, additionalProperties, items,
enum, pattern (of the whole text), minimum, and `$ref` to a name in `definitions`. They follow the docs of
Kubernetes' API and JobSet's `jobset_types.go`, without the fields that a training job has no use for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "schemas"
_TYPES: dict[str, type] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def find_faults(document: dict[str, Any]) -> list[str]:
    """Return what is wrong with an object; a kind without a schema is wrong too."""
    kind = f"{document.get('apiVersion')}.{document.get('kind')}".replace("/", "-")
    path = FOLDER / f"{kind}.json"
    if not path.is_file():
        return [f"there is no schema for {kind}"]
    schema = json.loads(path.read_text())
    return list(_check(document, schema, schema["definitions"], kind))


def _check(value: Any, schema: dict[str, Any], known: dict[str, Any], where: str) -> Iterator[str]:
    if "$ref" in schema:
        schema = known[schema["$ref"]]
    if "enum" in schema:
        if value not in schema["enum"]:
            yield f"{where}: {value!r} is none of {schema['enum']}"
        return
    if type(value) is not _TYPES[schema["type"]]:
        yield f"{where}: {value!r} is not of type {schema['type']}"
    elif schema["type"] == "object":
        if "additionalProperties" in schema:
            for key, inner in value.items():
                yield from _check(inner, schema["additionalProperties"], known, f"{where}.{key}")
            return
        yield from (f"{where}.{key} is missing" for key in schema["required"] if key not in value)
        for key, inner in value.items():
            if key in schema["properties"]:
                yield from _check(inner, schema["properties"][key], known, f"{where}.{key}")
            else:
                yield f"{where}.{key} is unknown"
    elif schema["type"] == "array":
        for number, inner in enumerate(value):
            yield from _check(inner, schema["items"], known, f"{where}[{number}]")
    elif schema["type"] == "integer" and value < schema.get("minimum", value):
        yield f"{where}: {value} is under {schema['minimum']}"
    elif "pattern" in schema and re.fullmatch(schema["pattern"], value) is None:
        yield f"{where}: {value!r} does not match {schema['pattern']}"
