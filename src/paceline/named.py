"""Finds the function that a text names, `my.module:build` or `folder/file.py:build`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.phrases import first_line


def find_named(source: str) -> Callable[..., Any]:
    """Import a module, or run a file, and return its function.

    Args:
        source: `MODULE:FUNCTION`, installed or in the working folder, or `FILE.py:FUNCTION`, which may
            import its neighbours, as a script does.

    Raises:
        LookupError: with a sentence that says what is missing, or what the import raised.
    """
    place, _, name = source.rpartition(":")
    folder = str(Path(place).resolve().parent) if place.endswith(".py") else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if not place.endswith(".py"):
            module = importlib.import_module(place)
        else:
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[Path(place).stem] = module
            spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything
        raise LookupError(
            f"{place} cannot be imported ({type(error).__name__}: {first_line(error)})."
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise LookupError(f"{place} has no function {name}.")
    return found  # type: ignore[no-any-return]
