"""Identifies what a node's ranks run, so that nodes with other code, another recipe or torch are refused."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_MOST_BYTES = 1 << 22


def read_folder() -> str:
    """Return the number by which the disk knows the working folder; nodes that share it have the same."""
    with suppress(OSError):
        return str(Path.cwd().stat().st_ino)
    return ""


def read_code(words: Sequence[str]) -> dict[str, str]:
    """Return versions, and for each word that names a Python file or a recipe, the hash of the file.

    Paths may differ between nodes, and so may all other words.

    Args:
        words: the script with its arguments, or `-m`, the module and its arguments.
    """
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("torch", "paceline"):
        with suppress(PackageNotFoundError):  # a source tree that is not installed
            found[package] = version(package)
    if words[0] == "-m":
        found["module"] = words[1]
    for word in words:
        path = Path(word)
        if path.suffix in (".py", ".toml"):
            with suppress(OSError), path.open("rb") as file:
                found[path.name] = f"({hashlib.sha256(file.read(_MOST_BYTES)).hexdigest()[:8]})"
    return found
