"""Passes a request on that the launcher, or somebody while the job runs, leaves in a launcher's folder.

A request is a file that names the function to call. A rank looks for the launcher's before its script's first
line, and the thread that watches the rank for the other one once per second. The folder belongs to the job's
user and to nobody else.
"""

from __future__ import annotations

import importlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

FIRST, REQUEST = "first-request.json", "request.json"
ENTRY = "entry"
"""The request's key for `module:function`; it is called with the rank, the folder and the whole request."""


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


class RequestReader:
    """The look for requests, in a rank.

    Args:
        rank: global.
        folder: the launcher's.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank = rank
        self._folder = str(folder)

    def look(self, name: str = REQUEST) -> None:
        """Call what a request names, if there is one; call it every second."""
        path = f"{self._folder}/{name}"
        if not os.access(path, os.F_OK):
            return
        with suppress(Exception):  # the script goes on, whatever was asked for
            table = read_table(Path(path))
            if table is not None:
                module, _, function = str(table[ENTRY]).partition(":")
                getattr(importlib.import_module(module), function)(self._rank, Path(self._folder), table)
