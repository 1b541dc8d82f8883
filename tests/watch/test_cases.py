"""The scripts of `scripts/` and the tables of `cases.py` fit each other, and no script gives itself away."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.watch.cases import FAULTY, HEALTHY, SCRIPTS, Case, read_marks

ALL = (*FAULTY, *HEALTHY)
TELLING = {
    *("bug", "crash", "culprit", "dead", "deadlock", "fault", "faulty", "forget", "forgot", "forgotten"),
    *("hang", "hangs", "hung", "killed", "mismatch", "missing", "stuck", "unequal", "uneven", "wrong"),
}
"""Words that a script would not have where its author didn't know what is wrong with it."""


def _id(case: Case) -> str:
    return case.script


def _split_words(name: str) -> list[str]:
    """`NotFound_here2` to not, found, here."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def _find_names(source: str) -> set[str]:
    """All identifiers of a script: those that it defines and those that it uses."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def _find_defined(source: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)}


def _find_comments(source: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return [*comments, ast.get_docstring(ast.parse(source)) or ""]


def test_there_are_enough():
    assert len(FAULTY) >= 44
    assert len(HEALTHY) >= 22


@pytest.mark.parametrize(("folder", "cases"), [("faulty", FAULTY), ("healthy", HEALTHY)])
def test_every_script_has_one_case(folder: str, cases: tuple[Case, ...]):
    files = sorted(path.stem for path in (SCRIPTS / folder).glob("*.py"))
    assert sorted(case.script for case in cases) == files


def test_names_are_unique():
    names = [case.script for case in ALL]
    assert len(set(names)) == len(names)


def test_every_kind_of_verdict_has_a_case():
    numbers = (330, 331, 644, 649, *range(800, 812), 820, 821)
    assert {case.codes[0] for case in FAULTY} == {f"PL{number}" for number in numbers}


@pytest.mark.parametrize("case", ALL, ids=_id)
def test_script_is_of_the_length_that_people_write(case: Case):
    source = case.path.read_text()
    compile(source, case.path, "exec")
    assert 30 <= len(source.splitlines()) <= 80


@pytest.mark.parametrize("case", FAULTY, ids=_id)
def test_marks_are_where_the_case_needs_them(case: Case):
    is_by_chance = not case.ranks_waiting and not case.ranks_missing
    assert bool(case.find_lines("WAITS")) == (bool(case.ranks_waiting) or is_by_chance)
    assert bool(case.ranks_waiting) == bool(case.operation)
    if case.ranks_missing:
        assert bool(case.find_lines("CAUSE")) != case.is_traceless


@pytest.mark.parametrize("case", FAULTY, ids=_id)
def test_marked_lines_hold_code_that_runs(case: Case):
    starts = {
        node.lineno for node in ast.walk(ast.parse(case.path.read_text())) if isinstance(node, ast.stmt)
    }
    assert {number for number, _ in read_marks(case.path)} <= starts


@pytest.mark.parametrize("case", HEALTHY, ids=_id)
def test_healthy_scripts_have_no_marks_and_expect_no_verdict(case: Case):
    assert not list(read_marks(case.path))
    assert (case.codes, case.ranks_waiting, case.ranks_missing) == ((), (), ())
    assert set(case.may_say) <= {"PL820"}
    assert case.lasts_s > 0


@pytest.mark.parametrize("case", ALL, ids=_id)
def test_ranks_and_words_of_a_case_hang_together(case: Case):
    ranks = [*case.ranks_waiting, *case.ranks_missing]
    assert len(set(ranks)) == len(ranks)
    assert set(ranks) <= set(range(case.nproc))
    assert case.kind == "healthy" or case.codes
    assert (case.alone == "fails") == bool(case.torch_says)
    assert (case.alone == "passes") == (case.lasts_s > 0)
    for pattern in (*case.says, case.torch_says):
        re.compile(pattern)


@pytest.mark.parametrize("case", FAULTY, ids=_id)
def test_script_does_not_give_itself_away(case: Case):
    source = case.path.read_text()
    words = {word for name in _find_names(source) for word in _split_words(name)}
    words |= {word for text in _find_comments(source) for word in _split_words(text)}
    assert not words & TELLING
    assert case.script not in _find_defined(source)


@pytest.mark.parametrize("case", FAULTY, ids=_id)
def test_only_marks_are_written_as_marks(case: Case):
    marked = dict(read_marks(case.path))
    for number, line in enumerate(case.path.read_text().splitlines(), 1):
        assert number in marked or not re.search(r"WAITS|CAUSE", line)


def test_marks_are_read(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("wait()  # WAITS\ncome()\nboth()  # WAITS CAUSE\nother()  # CAUSES\n")
    assert list(read_marks(script)) == [(1, ["WAITS"]), (3, ["WAITS", "CAUSE"])]
