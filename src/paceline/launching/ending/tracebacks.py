"""Reads tracebacks as text, and separates the user's own code from library code.

It reads text because text exists in all cases: an exception of this process, one that a loader worker sent
as part of another's message, and the log of a rank that started cold.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from paceline.own_code import PACKAGE, describe_place, is_own, library_roots

_FRAME = re.compile(r'^(?P<indent>[\s|+]*)File "(?P<path>.+)", line (?P<line>\d+)(?:,? in (?P<name>.+))?$')
_HEAD = re.compile(r"^(\s*\+ Exception Group )?Traceback \(most recent call last\):\s*$")
_ORIGINAL = "Original Traceback (most recent call last):"
# The line after the frames: the exception's name and its message.
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: |:?$)")
_SYNTAX = re.compile(r"^(SyntaxError|IndentationError|TabError)(: |$)")
_FATAL = "Fatal Python error"
_CRASH = re.compile(rf"^({_FATAL}|Stack \(most|Current thread|Thread 0x)")
# torch writes it before each line of an uncaught exception, once there is a process group.
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_RUNNER = os.path.join(PACKAGE, "launching", "rank", "script.py")
# Fewer than this many frames of a library in a row stay as they are.
_FEW = 3


@dataclass(frozen=True)
class TracebackFrame:
    """One frame of a traceback, with its lines of text."""

    path: str
    line: int
    name: str
    text: tuple[str, ...]

    @property
    def is_own(self) -> bool:
        """Return whether this is the user's code, outside of the folders of Python and its packages."""
        return is_own(self.path)

    @property
    def where(self) -> str:
        """The frame's place: `train.py:31 in load`."""
        return describe_place(self.path, self.line, self.name)


def find_own_frame(trace: str) -> TracebackFrame | None:
    """Return the innermost frame of the user's code."""
    own = [part for part in _parse(trace) if isinstance(part, TracebackFrame) and part.is_own]
    if not own:
        return None
    # Python prints a crash in the opposite order: the innermost frame comes first.
    return own[0] if trace.startswith(_FATAL) else own[-1]


def fold(trace: str) -> str:
    """Return the traceback with each run of library frames in one line."""
    out: list[str] = []
    run: list[TracebackFrame] = []

    def flush() -> None:
        if len(run) < _FEW:
            out.extend(line for frame in run for line in frame.text)
        else:
            names = " ... ".join(_short(frame) for frame in (run[0], run[-1]))
            indent = run[0].text[0][: len(run[0].text[0]) - len(run[0].text[0].lstrip())]
            out.append(f"{indent}[{len(run)} frames of libraries: {names}]")
        run.clear()

    for part in _parse(trace):
        if isinstance(part, TracebackFrame) and not part.is_own:
            run.append(part)
            continue
        flush()
        out.extend(part.text if isinstance(part, TracebackFrame) else [part])
    flush()
    return "\n".join(out)


def _short(frame: TracebackFrame) -> str:
    """Return a library's path, beginning with its package."""
    for root in library_roots():
        if frame.path.startswith(root):
            return f"{frame.path[len(root) :].removeprefix('site-packages' + os.sep)}:{frame.line}"
    return f"{frame.path}:{frame.line}"


def _parse(trace: str) -> list[TracebackFrame | str]:
    """Parse frames, and keep the lines between them."""
    parts: list[TracebackFrame | str] = []
    lines = trace.rstrip("\n").split("\n")
    at = 0
    while at < len(lines):
        match = _FRAME.match(lines[at])
        if match is None:
            parts.append(lines[at])
            at += 1
            continue
        end = at + 1
        deeper = len(match["indent"])
        while end < len(lines) and _FRAME.match(lines[end]) is None and _indent(lines[end]) > deeper:
            end += 1
        text = tuple(lines[at:end])
        parts.append(TracebackFrame(match["path"], int(match["line"]), match["name"] or "<module>", text))
        at = end
    return parts


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else 0


def find_last(log: str) -> str:
    """Return a log's last traceback, or Python's report of a crash in compiled code, else an empty string."""
    lines = _PREFIX.sub("", log).split("\n")
    starts = [n for n, line in enumerate(lines) if _HEAD.match(line)]
    crashes = [n for n, line in enumerate(lines) if line.startswith(_FATAL)]
    if crashes and (not starts or crashes[-1] > starts[-1]):
        end = crashes[-1]
        while end < len(lines) and (not lines[end] or lines[end].startswith(" ") or _CRASH.match(lines[end])):
            end += 1
        block = lines[crashes[-1] : end]
        # The outermost frames are ours, which run the script.
        ours = [n for n, line in enumerate(block) if f'"{_RUNNER}"' in line]
        return "\n".join(block[: ours[0]] if ours else block).rstrip()
    if not starts:
        return _find_syntax_error(lines)
    start = starts[-1]
    # Chained exceptions belong to it: "During handling of the above exception, ..." and "direct cause".
    for earlier in reversed(starts[:-1]):
        between = "\n".join(lines[earlier:start])
        if "above exception" not in between:
            break
        start = earlier
    end = _end_of_error(lines, starts[-1])
    if end < len(lines) and lines[end] == _ORIGINAL:  # a loader worker's, as part of the message
        end = _end_of_error(lines, end)
    return "\n".join(lines[start:end]).rstrip()


def _end_of_error(lines: list[str], head: int) -> int:
    """Return the end of an exception's lines: its frames, its own line, and those of its message."""
    end = head + 1
    is_group = "Exception Group" in lines[head]
    inside = (" ", "\t", "+", "|") if is_group else (" ", "\t")
    while end < len(lines) and (lines[end].startswith(inside) or not lines[end].strip()):
        end += 1
    if is_group:
        return end
    end += 1
    while end < len(lines) and lines[end].startswith((" ", "\t")):
        end += 1
    return end


def _find_syntax_error(lines: list[str]) -> str:
    """Find the place and the message of a script that does not compile: it has no traceback."""
    for at in range(len(lines) - 1, -1, -1):
        if not _SYNTAX.match(lines[at]):
            continue
        for start in range(at - 1, -1, -1):
            if _FRAME.match(lines[start]):
                return "\n".join(lines[start : at + 1])
            if not lines[start].startswith(" "):
                break
    return ""


def find_error_line(trace: str) -> str:
    """Return the line that names the exception."""
    text = trace.strip("\n")
    if text.startswith(_FATAL):
        return text.splitlines()[0]
    # After the last frame, whose lines are indented deeper than the exception's.
    parts = _parse(text)
    after = max((n for n, part in enumerate(parts) if isinstance(part, TracebackFrame)), default=-1)
    lines = [part.strip(" |+-") for part in parts[after + 1 :] if isinstance(part, str)]
    lines = [line for line in lines if line and not line.startswith("Traceback")]
    named = [line for line in lines if _EXCEPTION.match(line)]
    return (named or lines or text.strip().splitlines() or [""])[0].strip()
