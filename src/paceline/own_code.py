"""Distinguishes the user's own files from those of Python, its packages and Paceline."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache

PACKAGE = os.path.dirname(os.path.abspath(__file__))
"""The folder of this package."""


@lru_cache(maxsize=4096)
def is_own(path: str) -> bool:
    """Return whether a file is the user's: outside of the folders of Python and its packages."""
    return not path.startswith("<") and not any(path.startswith(root) for root in library_roots())


@lru_cache(maxsize=1)
def library_roots() -> tuple[str, ...]:
    """Return the folders of Python and its packages, each with a separator at its end."""
    paths = sysconfig.get_paths()
    roots = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots |= {PACKAGE, os.path.join(sys.prefix, "bin")}
    return tuple(root + os.sep for root in roots | {os.path.realpath(root) for root in roots})


def describe_place(path: str, line: int, function: str) -> str:
    """Return a place in a file, relative to the working folder if it is below: `train.py:31 in load`."""
    short = os.path.relpath(path)
    return f"{path if short.startswith('..') else short}:{line} in {function}"
