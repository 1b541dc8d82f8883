"""Passes on what the launcher asks its ranks for beside running their script.

A request is a file in the launcher's folder, which belongs to the job's user and to nobody else. It names the
function to call before the script's first line.
"""

from __future__ import annotations

import importlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

REQUEST = "request.json"
ENTRY = "entry"
"""The request's key for `module:function`; it is called with the rank and the whole request."""


def write_whole(path: Path, table: dict[str, Any]) -> None:
    """Write a file as JSON atomically, so that no reader sees a part of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(table), encoding="utf-8")
    os.replace(part, path)


def read_table(path: Path) -> dict[str, Any] | None:
    """Return what `write_whole` has written; `None` if there is nothing."""
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return table if isinstance(table, dict) else None


def follow_request(rank: int, folder: Path) -> None:
    """Call what the launcher's request names, if there is one; the script goes on, whatever was asked for."""
    table = read_table(folder / REQUEST)
    if table is not None:
        with suppress(Exception):
            module, _, function = str(table[ENTRY]).partition(":")
            getattr(importlib.import_module(module), function)(rank, table)
