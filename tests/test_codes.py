"""Every code that a message carries has a page, and every page belongs to a message."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from paceline.codes import PAGES

PACKAGE = Path(__file__).parent.parent / "src" / "paceline"


def codes_in(text: str) -> dict[str, int]:
    """The codes among a file's strings, alone or at the end of a message in brackets, with a line of each;
    docstrings don't count."""
    tree = ast.parse(text)
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            alone = re.fullmatch(r"PL\d{3}", node.value)
            codes = [alone[0]] if alone else re.findall(r"\[(PL\d{3})\]", node.value)
            found.update(dict.fromkeys(codes, node.lineno))
    return found


def test_codes_and_pages_match() -> None:
    used: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name != "codes":
            for code, line in codes_in(path.read_text(encoding="utf-8")).items():
                used[code] = f"{path.relative_to(PACKAGE)}:{line}"
    without_page = {code: place for code, place in used.items() if code not in PAGES}
    assert not without_page, "codes without a page in src/paceline/codes/"
    without_message = sorted(PAGES.keys() - used.keys())
    assert not without_message, "pages that no message leads to"


def test_pages_are_complete() -> None:
    for code, page in PAGES.items():
        assert re.fullmatch(r"PL[1-8]\d\d", code), code
        assert page.title, code
        assert not page.title.endswith("."), f"{code}: a title is no sentence"
        for text in (page.why, page.fix):
            assert text.rstrip("`)\"'").endswith((".", ":", "!")) or "://" in text.split()[-1], (
                f"{code}: {text!r}"
            )


def test_what_counts_as_a_code() -> None:
    text = (
        'def f():\n    """Raises PL101."""\n    "PL102"\n    raise E("PL103", saw="PL104 and more")\n'
        'print(f"{x}. [PL105]\\n", "PL106.")\n'
    )
    assert codes_in(text) == {"PL103": 4, "PL105": 5}
