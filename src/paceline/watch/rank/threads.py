"""Reads the stacks of this process's threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from types import CodeType, FrameType, TracebackType

from paceline.watch.protocol.frames import build_frame, is_watching
from paceline.watch.protocol.report import Frame, Stack

Mark = tuple[CodeType, int]
"""A frame in its cheapest form: its code, and the instruction in it."""


def mark_stack(frame: FrameType | None, most: int = 200) -> tuple[Mark, ...]:
    """Return the stack from a frame outwards, innermost first."""
    marks: list[Mark] = []
    while frame is not None and len(marks) < most:
        marks.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(marks)


def mark_traceback(trace: TracebackType | None) -> tuple[Mark, ...]:
    """Return the stack at which an exception was raised, innermost first."""
    marks: list[Mark] = []
    while trace is not None:
        marks.append((trace.tb_frame.f_code, trace.tb_lasti))
        trace = trace.tb_next
    return tuple(reversed(marks))


def resolve(marks: Iterable[Mark]) -> tuple[Frame, ...]:
    """Return frames with their lines, without those of this package."""
    return tuple(
        build_frame(code.co_filename, _find_line(code, at), code.co_name)
        for code, at in marks
        if not is_watching(code.co_filename)
    )


def _find_line(code: CodeType, at: int) -> int:
    for start, end, line in code.co_lines():
        if start <= at < end:
            return line or 0
    return code.co_firstlineno


# ---- threads


def mark_main_thread() -> tuple[Mark, ...]:
    """Return the main thread's stack; empty once it has ended."""
    return mark_stack(sys._current_frames().get(threading.main_thread().ident or 0))


def read_stacks() -> tuple[Stack, ...]:
    """Return the stacks of all threads but the calling one, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, here = threading.main_thread().ident, threading.get_ident()
    found = [
        (ident != main, Stack(names.get(ident, f"thread {ident}"), resolve(mark_stack(frame))))
        for ident, frame in sys._current_frames().items()
        if ident != here
    ]
    return tuple(stack for _, stack in sorted(found, key=lambda pair: pair[0]))
