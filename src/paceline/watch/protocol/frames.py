"""Builds frames of a stack, and distinguishes the user's files from those of libraries and of this
package."""

from __future__ import annotations

import linecache
import os
from functools import lru_cache
from pathlib import Path

from paceline.launching.ending import trace
from paceline.watch.protocol.report import Frame

_WATCH = str(Path(__file__).resolve().parent.parent) + os.sep


@lru_cache(maxsize=4096)
def is_own(path: str) -> bool:
    """Return whether a file is the user's: outside of Python's and its packages' folders."""
    return trace.TracebackFrame(path, 0, "", ()).is_own


def build_frame(path: str, line: int, function: str) -> Frame:
    """Return a frame, with its line's source where the file is the user's."""
    # The sources of libraries are not shown to anybody, and reading them takes time.
    text = linecache.getline(path, line).strip() if line and is_own(path) else ""
    return Frame(path, line, function, text)


def is_watching(path: str) -> bool:
    """Return whether a file belongs to this package, whose frames are not reported."""
    return path.startswith(_WATCH)
