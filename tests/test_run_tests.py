"""`make test` runs every test once, and says so in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import run_tests

ROOT = Path(__file__).parent.parent


def test_every_file_is_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    files = [file for part in run_tests.split_tests() for file in part]
    assert sorted(files) == sorted(str(path) for path in Path("tests").rglob("test_*.py"))
    assert all(run_tests.split_tests())
    assert {
        name for part in run_tests.PARTS for name in part if not (ROOT / "tests" / name).is_dir()
    } == set()


def test_counts_are_added_up() -> None:
    first = "....\n2 failed, 3 passed, 1 skipped in 4.00s\n"
    assert run_tests.add_up(first, "..\n7 passed, 9 deselected in 1s") == (
        "2 failed, 10 passed, 1 skipped, 9 deselected"
    )
    assert run_tests.add_up("killed") == "no tests ran"


def test_a_failure_in_one_part_is_the_whole_runs(tmp_path: Path) -> None:
    for part, body in (("launching", "assert 1"), ("other", "assert 0")):
        (tmp_path / "tests" / part).mkdir(parents=True)
        text = f"def test_it_{part}():\n    {body}\n"
        (tmp_path / "tests" / part / f"test_{part}.py").write_text(text)
    command = [sys.executable, str(ROOT / "tools" / "run_tests.py"), "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout
    assert done.stdout.splitlines()[-1] == "1 passed, 1 failed"
