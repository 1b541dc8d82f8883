"""Distinguishes the user's own files from those of Python, its packages and Paceline."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from functools import lru_cache
from types import TracebackType

from paceline.errors import PacelineError

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
    return f"{shorten_path(path)}:{line} in {function}"


def shorten_path(path: str) -> str:
    """Return a path relative to the working folder if it is below, and as it is otherwise."""
    try:
        short = os.path.relpath(path)
    except OSError:  # the folder has gone, which must not hide what else went wrong
        return path
    return path if short.startswith("..") else short


def print_errors_alone() -> None:
    """Print an uncaught `PacelineError` as its message and the user's line, and other errors as before.

    torch's hook, which `init_process_group` installs, calls this one and puts the rank before each line.
    """
    before = sys.excepthook
    if before.__module__ == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, PacelineError):
            before(kind, error, trace)
            return
        frames = [frame for frame in traceback.extract_tb(trace) if is_own(frame.filename)]
        places = [f"at {describe_place(f.filename, f.lineno or 0, f.name)}" for f in frames[-1:]]
        notes = getattr(error, "__notes__", ())
        sys.stderr.write("\n  ".join([f"paceline: {error}", *notes, *places]) + "\n")

    sys.excepthook = hook
