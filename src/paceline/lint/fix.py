"""Edits for the findings that have one right repair; the bytes outside of an edit stay."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.lint.check import LintFinding


@dataclass(frozen=True, order=True)
class ByteEdit:
    """Bytes of a file that are replaced, from `start` to `end`."""

    start: int
    end: int
    text: str


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

    def find(self, finding: LintFinding) -> list[ast.AST]:
        """Return the nodes at a finding's place."""
        here = (finding.line, finding.column - 1, finding.end_line, finding.end_column - 1)
        names = ("lineno", "col_offset", "end_lineno", "end_col_offset")
        return [
            node for node in ast.walk(self.tree) if tuple(getattr(node, name, None) for name in names) == here
        ]

    def drop_keyword(self, call: ast.Call, name: str) -> list[ByteEdit]:
        """Return the edit that removes a keyword argument with the comma before it."""
        parts = sorted([*call.args, *call.keywords], key=lambda part: self.span(part))
        for before, part in zip([None, *parts], parts, strict=False):
            if isinstance(part, ast.keyword) and part.arg == name and before is not None:
                return [ByteEdit(self.span(before)[1], self.span(part)[1], "")]
        return []


def _shuffle(file: _Script, node: ast.AST) -> list[ByteEdit]:
    return file.drop_keyword(node, "shuffle") if isinstance(node, ast.Call) else []


def _sampler(file: _Script, node: ast.AST) -> list[ByteEdit]:
    if not isinstance(node, ast.Call) or len(node.args) > 1:
        return []
    return [*file.drop_keyword(node, "num_replicas"), *file.drop_keyword(node, "rank")]


def _clear(file: _Script, node: ast.AST) -> list[ByteEdit]:
    """Clear the gradients in a line of its own, after `optimizer.step()`."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return []
    call = node.value
    if not isinstance(call.func, ast.Attribute) or call.args or node.end_lineno is None:
        return []
    line = file.data[file.starts[node.lineno - 1] : file.starts[node.end_lineno]]
    indent = line[: node.col_offset].decode()
    if indent.strip() or b";" in line:
        return []
    end = file.starts[node.end_lineno]
    newline = "" if line.endswith(b"\n") else "\n"
    return [ByteEdit(end, end, f"{newline}{indent}{file.source(call.func.value)}.zero_grad()\n")]


def _load(file: _Script, node: ast.AST) -> list[ByteEdit]:
    if not isinstance(node, ast.Call) or not node.args:
        return []
    end = file.span(node.args[0])[1]
    return [ByteEdit(end, end, ', map_location="cpu"')]


def _address(file: _Script, node: ast.AST) -> list[ByteEdit]:
    for statement in ast.walk(file.tree):
        if (
            isinstance(statement, ast.Assign)
            and statement.targets == [node]
            and isinstance(node, ast.Subscript)
        ):
            owner, key, value = (file.source(part) for part in (node.value, node.slice, statement.value))
            return [ByteEdit(*file.span(statement), f"{owner}.setdefault({key}, {value})")]
    return []


def _inner(file: _Script, node: ast.AST) -> list[ByteEdit]:
    if not isinstance(node, ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node
    if not isinstance(node, ast.Attribute):
        return []
    end = file.span(node.value)[1]
    return [ByteEdit(end, end, ".module")]


def _state(file: _Script, node: ast.AST) -> list[ByteEdit]:
    """Save the state dict of the module inside, where the script wraps it under the same name."""
    wrapped = {
        target.id
        for part in ast.walk(file.tree)
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Call)
        for target in part.targets
        if isinstance(target, ast.Name)
        and file.source(part.value.func).rpartition(".")[2] in ("DDP", "DistributedDataParallel")
    }
    for part in ast.walk(node):
        name = getattr(part.value, "id", "") if isinstance(part, ast.Attribute) else ""
        if name in wrapped and part.attr == "state_dict" and not _is_parameter(file.tree, name):  # type: ignore[attr-defined]
            return _inner(file, part)
    return []


def _is_parameter(tree: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.arg) and node.arg == name for node in ast.walk(tree))


FIXES: dict[str, Callable[[_Script, ast.AST], list[ByteEdit]]] = {
    "PL022": _sampler,
    "PL023": _shuffle,
    "PL030": _clear,
    "PL040": _state,
    "PL043": _load,
    "PL058": _address,
}


def fix_text(text: str, findings: Sequence[LintFinding]) -> tuple[str, int]:
    """Return the text with the findings that have one right repair repaired, and how many these are."""
    file = _Script(text)
    edits: set[ByteEdit] = set()
    count = 0
    for finding in findings:
        for node in file.find(finding) if finding.code in FIXES else ():
            found = FIXES[finding.code](file, node)
            if finding.code == "PL030":
                parents = [
                    part for part in ast.walk(file.tree) if isinstance(part, ast.Expr) and part.value is node
                ]
                found = _clear(file, parents[0]) if parents else []
            if found:
                edits |= set(found)
                count += 1
                break
    data = file.data
    last = len(data) + 1
    for edit in sorted(edits, reverse=True):
        if edit.end <= last:
            data = data[: edit.start] + edit.text.encode() + data[edit.end :]
            last = edit.start
    fixed = data.decode()
    try:
        ast.parse(fixed)
    except SyntaxError:
        return text, 0
    return fixed, count
