"""Every code that a message carries has a page, and every page belongs to a message."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paceline.codes import Page, parse_pages, read_pages

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "paceline"


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
        for code, line in codes_in(path.read_text(encoding="utf-8")).items():
            used[code] = f"{path.relative_to(PACKAGE)}:{line}"
    pages = read_pages()
    without_page = {code: place for code, place in used.items() if code not in pages}
    assert not without_page, "codes without a page in src/paceline/codes/"
    without_message = sorted(pages.keys() - used.keys())
    assert not without_message, "pages that no message leads to"


def test_pages_are_complete() -> None:
    for code, page in read_pages().items():
        assert re.fullmatch(r"PL\d\d\d", code), code
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


GOOD = (
    "# Topic\n\n## PL101: A title\n\nA rule.\nIts reason.\n\n**Fix:** Do this.\n\n"
    "## PL102: `x`\n\nRule.\n\n**Fix:** Fix.\n"
)


def test_a_page_is_read_with_its_example() -> None:
    text = GOOD + "\n```\nfirst\n\nsecond\n```\n"
    assert parse_pages(text, "x.md") == {
        "PL101": Page("A title", "A rule. Its reason.", "Do this."),
        "PL102": Page("`x`", "Rule.", "Fix.", "first\n\nsecond"),
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# Topic\n\n", "", "the first line"),
        ("# Topic\n\n", "# Topic\n\nWords.\n\n", "the page 'Words.'"),
        ("PL101: A", "PL01: A", "the page 'PL01: A title'"),
        ("PL101: A", "PL101 A", "the page 'PL101 A title'"),
        ("PL102", "PL101", "PL101 stands after PL101"),
        ("PL102", "PL100", "PL100 stands after PL101"),
        ("## PL102", "### PL102", "the page 'PL101: A title'"),
        ("\n\n## PL102", "\n## PL102", "the page 'PL101: A title'"),
        ("A rule.\nIts reason.\n\n", "", "the page 'PL101: A title'"),
        ("A rule.\n", "A rule.\n\n", "the page 'PL101: A title'"),
        ("**Fix:** Do this.\n\n", "", "the page 'PL101: A title'"),
        ("**Fix:** Do", "**Mend:** Do", "the page 'PL101: A title'"),
        ("Do this.\n", "Do this.\n\n```\nopen\n", "the page 'PL101: A title'"),
    ],
)
def test_a_malformed_page_is_named(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ValueError, match=re.escape(f"x.md: {message}")):
        parse_pages(GOOD.replace(old, new, 1), "x.md")


def test_importing_reads_no_page() -> None:
    code = "import paceline.cli.main, paceline.codes as codes\nprint(codes.read_pages.cache_info().currsize)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "0\n"


def test_the_package_ships_pages_and_lists() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["paceline"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert {*PACKAGE.rglob("*.md"), *PACKAGE.rglob("*.txt")} <= shipped
