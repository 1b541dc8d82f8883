"""The examples run, on one rank and on three, and tell the same; the README shows what they hold."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from paceline.launching.local import launch

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run_example(path: Path, folder: Path, nproc: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(path.parent))
    launch(importlib.import_module(path.stem).main, nproc, log_dir=folder)
    lines = (folder / "rank-0000.log").read_text(encoding="utf-8").splitlines()
    # One rank has more cores to itself than three have, and is told that it uses one of them.
    return [line for line in lines if "CPU thread per rank" not in line]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_reports_the_same_on_one_rank_and_on_three(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run_example(path, tmp_path / "one", 1, monkeypatch)
    together = run_example(path, tmp_path / "three", 3, monkeypatch)
    assert len(alone) >= 3
    assert len(alone) == len(together)
    for one, three in zip(alone, together, strict=True):
        numbers = r"-?\d+\.\d+(?:e[-+]\d+)?"
        assert re.sub(numbers, "#", one) == re.sub(numbers, "#", three)
        ours, theirs = (list(map(float, re.findall(numbers, line))) for line in (one, three))
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_readme_shows_the_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = {
        line.strip() for line in (ROOT / "examples/digits.py").read_text(encoding="utf-8").splitlines()
    }
    diff = readme.split("```diff\n")[1].split("```")[0]
    shown = [line[1:].strip() for line in diff.splitlines() if line[:1] in ("+", " ")]
    assert len(shown) > 8
    assert not [line for line in shown if line not in example]
