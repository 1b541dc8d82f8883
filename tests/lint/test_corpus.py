"""Scripts as people write them: a comment marks the line of each finding, and there is no other one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.lint import check_text

CORPUS = Path(__file__).parent / "corpus"
HANGS = Path(__file__).parents[1] / "watch" / "scripts"
SCRIPTS = sorted(CORPUS.glob("*.py"))


def expected(text: str) -> list[tuple[int, str]]:
    """The lines and codes that a script's comments announce."""
    lines = enumerate(text.splitlines(), 1)
    return [(number, code) for number, line in lines for code in re.findall(r"# (PL\d{3})(?= #|$)", line)]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = check_text(text, str(path))
    assert [(one.line, one.code) for one in found] == expected(text), "\n".join(map(str, found))


def test_what_hangs_is_named_before_it_runs() -> None:
    """The others of the scripts that hang, crash or are slow show it only while they run."""
    named = {
        kind: [
            path.stem
            for path in sorted((HANGS / kind).glob("*.py"))
            if check_text(path.read_text(), str(path))
        ]
        for kind in ("faulty", "healthy")
    }
    assert len(named["faulty"]) >= 43, named["faulty"]
    assert named["healthy"] == []


def test_every_rule_has_two_faulty_scripts_and_three_healthy_ones() -> None:
    from paceline.lint.rules import RULES

    for code in RULES:
        names = [path.stem for path in SCRIPTS if path.stem.startswith(code.lower())]
        assert sum("_bad_" in name for name in names) >= 2, code
        assert sum("_ok_" in name for name in names) >= 3, code
