"""Edits for the findings that have one right repair; the bytes outside of an edit stay."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from paceline.lint.check import LintFinding

# From which byte to which, and what comes there.
Edit: TypeAlias = tuple[int, int, str]


class _Script:
    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.tree = ast.parse(text)
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the bytes of a node."""
        start = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return start, end

    def source(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    def find(self, finding: LintFinding) -> Iterator[ast.AST]:
        """Yield the nodes at a finding's place, a statement before its expression."""
        here = (finding.line, finding.column - 1, finding.end_line, finding.end_column - 1)
        names = ("lineno", "col_offset", "end_lineno", "end_col_offset")
        for node in ast.walk(self.tree):
            if tuple(getattr(node, name, None) for name in names) == here:
                yield node


def _drop_keywords(most_args: int, *names: str) -> Callable[[_Script, ast.AST], list[Edit]]:
    """Return the fix that removes keyword arguments of a call, each with the comma before it."""

    def drop(file: _Script, node: ast.AST) -> list[Edit]:
        if not isinstance(node, ast.Call) or len(node.args) > most_args:
            return []
        parts = sorted([*node.args, *node.keywords], key=file.span)
        return [
            (file.span(before)[1], file.span(part)[1], "")
            for before, part in itertools.pairwise(parts)
            if isinstance(part, ast.keyword) and part.arg in names
        ]

    return drop


def _clear(file: _Script, node: ast.AST) -> list[Edit]:
    """Clear the gradients in a line of its own, after `optimizer.step()`."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return []
    function = node.value.func
    first, end = file.starts[node.lineno - 1], file.starts[node.end_lineno or node.lineno]
    line = file.data[first:end]
    indent = line[: node.col_offset].decode()
    if not isinstance(function, ast.Attribute) or node.value.args or indent.strip() or b";" in line:
        return []
    newline = "\r\n" if line.endswith(b"\r\n") else "\n"
    before = "" if line.endswith(b"\n") else newline
    return [(end, end, f"{before}{indent}{file.source(function.value)}.zero_grad(){newline}")]


def _load(file: _Script, node: ast.AST) -> list[Edit]:
    end = file.span(node.args[0])[1] if isinstance(node, ast.Call) and node.args else 0
    return [(end, end, ', map_location="cpu"')] if end else []


def _address(file: _Script, node: ast.AST) -> list[Edit]:
    for statement in ast.walk(file.tree):
        if isinstance(statement, ast.Assign) and statement.targets == [node]:
            assert isinstance(node, ast.Subscript)
            owner, key, value = (file.source(part) for part in (node.value, node.slice, statement.value))
            return [(*file.span(statement), f"{owner}.setdefault({key}, {value})")]
    return []


def _state(file: _Script, node: ast.AST) -> list[Edit]:
    """Save the state dict of the module inside, where the script wraps it under the same name."""
    wrapped = {
        target.id
        for part in ast.walk(file.tree)
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Call)
        for target in part.targets
        if isinstance(target, ast.Name)
        and file.source(part.value.func).rpartition(".")[2] in ("DDP", "DistributedDataParallel")
    }
    wrapped -= {part.arg for part in ast.walk(file.tree) if isinstance(part, ast.arg)}
    return [
        (file.span(part.value)[1], file.span(part.value)[1], ".module")
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and part.attr == "state_dict"
        if isinstance(part.value, ast.Name) and part.value.id in wrapped
    ]


FIXES: dict[str, Callable[[_Script, ast.AST], list[Edit]]] = {
    "PL022": _drop_keywords(1, "num_replicas", "rank"),
    "PL023": _drop_keywords(2, "shuffle"),
    "PL030": _clear,
    "PL040": _state,
    "PL043": _load,
    "PL058": _address,
}


def fix_text(text: str, findings: Sequence[LintFinding]) -> tuple[str, int]:
    """Return the text with the findings that have one right repair repaired, and how many these are."""
    file = _Script(text)
    edits: set[Edit] = set()
    count = 0
    for finding in findings:
        for node in file.find(finding) if finding.code in FIXES else ():
            if found := FIXES[finding.code](file, node):
                edits |= set(found)
                count += 1
                break
    data = file.data
    last = len(data) + 1
    for start, end, new in sorted(edits, reverse=True):
        if end <= last:
            data = data[:start] + new.encode() + data[end:]
            last = start
    fixed = data.decode()
    try:
        ast.parse(fixed)
    except SyntaxError:
        return text, 0
    return fixed, count
