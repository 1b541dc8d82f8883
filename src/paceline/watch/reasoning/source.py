"""Finds the condition, loop and exception handler around a line of the user's code."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.watch.protocol.report import Frame

_RANK = re.compile(
    r"rank|process_index|(?<![a-z])(main|master|chief|leader|primary|coordinator)(?![a-z])", re.I
)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_MEETING = ("init_method", "rank", "world_size", "store")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)
# Exceptions that signal an end rather than a failure.
_ENDS = re.compile(r"StopIteration|KeyboardInterrupt|GeneratorExit")
_EXITS = re.compile(r"\b(sys\.exit|os\._exit|exit|quit)\(")


@dataclass(frozen=True)
class SourceSpot:
    """A line of source.

    Attributes:
        line: from 1.
        text: without indentation.
    """

    file: str
    line: int
    text: str

    @property
    def frame(self) -> Frame:
        """The line as a frame, for messages."""
        return Frame(self.file, self.line, "", self.text)


@dataclass(frozen=True)
class LoopInSource:
    """A loop.

    Attributes:
        spot: its first line.
        ends: its last line.
        ways_out: conditions in it, each with the `break`, `return`, `continue` or exit that it leads to.
    """

    spot: SourceSpot
    ends: int
    ways_out: tuple[tuple[SourceSpot, SourceSpot], ...]


class Source:
    """Source files by path, each read and parsed once.

    Args:
        read: returns a file's lines, none if it cannot be read; `None` without any source.
    """

    def __init__(self, read: Callable[[str], Sequence[str]] | None = None) -> None:
        self._read = read
        self._lines: dict[str, Sequence[str]] = {}
        self._trees: dict[str, ast.Module | None] = {}

    def lines(self, path: str) -> Sequence[str]:
        """Return a file's lines."""
        if path not in self._lines:
            self._lines[path] = [] if self._read is None else self._read(path)
        return self._lines[path]

    def line(self, path: str, number: int) -> str:
        """Return one line without indentation; empty if there is none."""
        lines = self.lines(path)
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""

    def find_text(self, path: str, pattern: str) -> SourceSpot | None:
        """Return the first line of a file that matches a pattern."""
        for number, text in enumerate(self.lines(path), 1):
            if re.search(pattern, text.split("#")[0]):
                return SourceSpot(path, number, text.strip())
        return None

    def find_meeting(self, frame: Frame) -> list[str] | None:
        """Return the names in the arguments of init_process_group at a line that say where ranks meet, and as
        whom; `None` if there is no such argument."""
        for node, _ in self._around(frame):
            for call in ast.walk(node) if isinstance(node, ast.stmt) else ():
                is_here = isinstance(call, ast.Call) and call.lineno <= frame.line <= (call.end_lineno or 0)
                if (
                    is_here
                    and isinstance(call, ast.Call)
                    and ast.unparse(call.func).endswith("init_process_group")
                ):
                    values = [*call.args[1:2], *call.args[3:]]  # without backend and timeout
                    values += [each.value for each in call.keywords if each.arg in (*_MEETING, None)]
                    if not values:
                        return None
                    inside = [n for value in values for n in ast.walk(value)]
                    names = [n.id if isinstance(n, ast.Name) else getattr(n, "attr", "") for n in inside]
                    return [name for name in names if name]
        return None

    def find_rank_condition(self, frame: Frame) -> SourceSpot | None:
        """Return the condition on the rank, in its function, that leads to a line: an `if`, or an exit above
        it."""
        for node, name in self._within(frame):
            if isinstance(node, ast.If | ast.IfExp | ast.While) and name != "test" and _names_rank(node.test):
                return self._spot(frame.file, node.lineno)
            if isinstance(node, ast.BoolOp) and _names_rank(node):
                return self._spot(frame.file, node.lineno)
        return self._find_guard(frame, self._around(frame))

    def find_condition(self, frame: Frame, line: int | None) -> SourceSpot | None:
        """Return the innermost `if` around a line that does not also contain another line of the function."""
        for node, name in self._within(frame):
            if isinstance(node, ast.If) and name != "test" and "__name__" not in ast.unparse(node.test):
                is_shared = line is not None and node.lineno <= line <= (node.end_lineno or node.lineno)
                return None if is_shared else self._spot(frame.file, node.lineno)
        return None

    def find_handler(self, frame: Frame) -> SourceSpot | None:
        """Return the `except` whose body contains a line."""
        for node, _ in self._within(frame):
            if isinstance(node, ast.ExceptHandler):
                return self._spot(frame.file, node.lineno)
        return None

    def find_swallowing(self, frame: Frame) -> SourceSpot | None:
        """Return an `except` that continues without raising, of a `try` whose body contains a line."""
        for node, name in self._within(frame):
            for handler in node.handlers if isinstance(node, ast.Try) and name == "body" else ():
                is_end = handler.type is not None and _ENDS.search(ast.unparse(handler.type))
                raises = any(isinstance(n, ast.Raise) for n in ast.walk(handler))
                if not is_end and not raises and not _EXITS.search(ast.unparse(handler)):
                    return self._spot(frame.file, handler.lineno)
        return None

    def find_loops(self, frame: Frame) -> list[LoopInSource]:
        """Return the loops around a line in its function, outermost first."""
        found: list[LoopInSource] = []
        for node, name in self._within(frame):
            if isinstance(node, _LOOPS) and name in ("body", "test"):
                spot = self._spot(frame.file, node.lineno)
                ways = [
                    (self._spot(frame.file, test.lineno), self._spot(frame.file, leave.lineno))
                    for test, leave in _walk_ways_out(node, frame.line)
                ]
                if spot is not None:
                    known = tuple((test, way) for test, way in ways if test is not None and way is not None)
                    found.insert(0, LoopInSource(spot, node.end_lineno or node.lineno, known))
        return found

    def _within(self, frame: Frame) -> Iterator[tuple[ast.AST, str]]:
        """Yield the nodes around a line in its function, innermost first, as `_around` does."""
        around = reversed(self._around(frame))
        return itertools.takewhile(lambda pair: not isinstance(pair[0], _FUNCTIONS), around)

    def _find_guard(self, frame: Frame, around: list[tuple[ast.AST, str]]) -> SourceSpot | None:
        """Return an `if rank != 0: return` above a line, in a block that contains the line."""
        past_loop = False
        for node, name in reversed(around):
            for before in getattr(node, name, []) if isinstance(getattr(node, name, None), list) else []:
                if not isinstance(before, ast.If) or before.lineno >= frame.line:
                    continue
                last = before.body[-1]
                leaves = isinstance(last, ast.Return | ast.Raise) or (
                    isinstance(last, _LEAVES) and not past_loop
                )
                if _names_rank(before.test) and (leaves or _EXITS.search(ast.unparse(last))):
                    end = before.end_lineno or before.lineno
                    return self._spot(frame.file, before.lineno) if end < frame.line else None
            if isinstance(node, _FUNCTIONS):
                return None
            past_loop = past_loop or isinstance(node, _LOOPS)
        return None

    def _around(self, frame: Frame) -> list[tuple[ast.AST, str]]:
        """Return the nodes around a line, outermost first, each with the field that contains the next one."""
        if frame.file not in self._trees:
            try:
                self._trees[frame.file] = ast.parse("\n".join(self.lines(frame.file)))
            except (SyntaxError, ValueError):
                self._trees[frame.file] = None
        tree = self._trees[frame.file]
        found: list[tuple[ast.AST, str]] = []
        node: ast.AST | None = tree
        while node is not None:
            inside = _child_at(node, frame.line)
            if inside is None:
                break
            found.append((node, inside[0]))
            node = inside[1]
        return found

    def _spot(self, path: str, line: int) -> SourceSpot | None:
        text = self.line(path, line)
        return SourceSpot(path, line, text) if text else None


def _child_at(node: ast.AST, line: int) -> tuple[str, ast.AST] | None:
    """Return the part of a node that contains a line; for `if test: call()` on one line, the call."""
    found: tuple[str, ast.AST] | None = None
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            end = getattr(child, "end_lineno", None)
            start = getattr(child, "lineno", None)
            if not isinstance(child, ast.AST) or start is None or end is None or not start <= line <= end:
                continue
            if found is None or found[0] == "test":
                found = (name, child)
    return found


def _names_rank(test: ast.AST) -> bool:
    text = ast.unparse(test)
    return "__name__" not in text and bool(_RANK.search(text))


def _walk_ways_out(loop: ast.AST, line: int) -> Iterator[tuple[ast.If, ast.stmt]]:
    """Yield each `if` in a loop that leads out of it, or past a line of it, with the statement that
    leaves."""
    waiting = [(child, False) for child in ast.iter_child_nodes(loop)]
    while waiting:
        node, is_deeper = waiting.pop(0)
        if isinstance(node, _FUNCTIONS):
            continue
        for leave in node.body if isinstance(node, ast.If) else []:
            is_exit = isinstance(leave, ast.Expr) and _EXITS.search(ast.unparse(leave))
            leaves_round = isinstance(leave, ast.Break) or (
                isinstance(leave, ast.Continue) and leave.lineno < line
            )
            if is_exit or isinstance(leave, ast.Return) or (leaves_round and not is_deeper):
                assert isinstance(node, ast.If)
                yield node, leave
        is_deeper = is_deeper or isinstance(node, _LOOPS)
        waiting += [(child, is_deeper) for child in ast.iter_child_nodes(node)]
