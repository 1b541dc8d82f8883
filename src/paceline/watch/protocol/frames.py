"""Builds frames of a stack, and distinguishes those of this package."""

from __future__ import annotations

import linecache
import os

from paceline.own_code import PACKAGE, is_own
from paceline.watch.protocol.report import Frame

_WATCH = os.path.join(PACKAGE, "watch", "")


def build_frame(path: str, line: int, function: str) -> Frame:
    """Return a frame, with its line's source where the file is the user's."""
    # The sources of libraries are not shown to anybody, and reading them takes time.
    text = linecache.getline(path, line).strip() if line and is_own(path) else ""
    return Frame(path, line, function, text)


def is_watching(path: str) -> bool:
    """Return whether a file belongs to this package, whose frames are not reported."""
    return path.startswith(_WATCH)
