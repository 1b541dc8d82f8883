"""The tutorials of docs/tutorials/ run from top to bottom; each command ends as its page says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
_spec = importlib.util.spec_from_file_location("tutorials", DOCS / "tutorials.py")
assert _spec is not None
assert _spec.loader is not None
tutorials = importlib.util.module_from_spec(_spec)
sys.modules["tutorials"] = tutorials  # where dataclasses look for it
_spec.loader.exec_module(tutorials)
NAMES = sorted(path.stem for path in tutorials.PAGES.glob("[0-9]*.md"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_runs(name: str, tmp_path: Path) -> None:
    assert "\n$ " in tutorials.run_page(tutorials.PAGES / f"{name}.md", tmp_path)


def test_a_command_that_ends_otherwise_fails_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ exit 3  # exit 3\n```\n")
    assert tutorials.run_page(page, tmp_path) == page.read_text()
    page.write_text("```python\n# a.py\nraise SystemExit(4)\n```\n```console\n$ python a.py\n```\n")
    with pytest.raises(tutorials.UnexpectedEndError, match="ended with 4"):
        tutorials.run_page(page, tmp_path)


def test_each_page_is_listed() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [line.partition("/")[2] for line in index.splitlines() if line.startswith("tutorials/")] == NAMES
