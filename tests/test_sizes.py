"""Holds files to 600 lines and functions to 100. The exceptions are listed, and the list may only shrink."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "paceline"
MOST_LINES = 600
MOST_LINES_OF_A_FUNCTION = 100

# What is longer, with the lines it had when it was listed. Lower a number when you shorten its file.
LONGER: dict[str, int] = {}


def measure(path: str, text: str) -> dict[str, int]:
    """Return the lines of a file and of each function in it, methods by `path: Class.method`."""
    found = {path: len(text.splitlines())}

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = owner
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{owner}.{child.name}" if owner else child.name
                if not isinstance(child, ast.ClassDef):
                    found[f"{path}: {name}"] = (child.end_lineno or 0) - child.lineno + 1
            visit(child, name)

    visit(ast.parse(text, path), "")
    return found


def find_long(lines: dict[str, int], longer: dict[str, int]) -> list[str]:
    """Return what is too long, and exceptions that are none any more."""
    found = []
    for what, count in lines.items():
        most = MOST_LINES_OF_A_FUNCTION if ": " in what else MOST_LINES
        if count > longer.get(what, most):
            found.append(f"{what} has {count} lines, at most {longer.get(what, most)}: divide it")
        elif what in longer and count <= most:
            found.append(f"{what} has {count} lines and needs no exception: take it off the list")
    return found + [f"{what} is on the list and does not exist" for what in longer if what not in lines]


def test_files_and_functions_are_short() -> None:
    lines: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        lines |= measure(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))
    assert len(lines) > 1000, f"{PACKAGE} was not found"
    found = find_long(lines, LONGER)
    assert not found, "\n".join(found)


def test_what_is_too_long_is_found() -> None:
    text = "class A:\n    def f(self):\n" + "        x = 1\n" * 100 + "y = 1\n" * 500
    lines = measure("a.py", text)
    assert lines == {"a.py": 602, "a.py: A.f": 101}
    assert len(find_long(lines, {})) == 2
    assert find_long(lines, {"a.py": 602, "a.py: A.f": 101}) == []
    assert find_long(lines, {"a.py": 601, "a.py: A.f": 101}) == ["a.py has 602 lines, at most 601: divide it"]
    assert find_long({"a.py": 3}, {"a.py": 700, "b.py": 700}) == [
        "a.py has 3 lines and needs no exception: take it off the list",
        "b.py is on the list and does not exist",
    ]
