"""`paceline run` on scripts that end well and have trained wrongly: real ranks and launchers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching.launched import Launched, paceline_run

SCRIPT = Path(__file__).parents[1] / "scripts" / "own" / "trains_wrongly.py"
STEP = 1 + next(n for n, line in enumerate(SCRIPT.read_text().splitlines()) if line.endswith("# STEP"))
_END_S = 90.0


def run(folder: Path, mistake: str, *words: str) -> str:
    command = paceline_run("--no-lint", "--nproc-per-node", "2", *words, str(SCRIPT), mistake)
    with Launched(folder, command) as job:
        assert job.wait(_END_S) == 0
        assert job.text.count("has ended") == 2
        return job.text


def test_a_setting_that_differs_is_named_with_its_line(tmp_path: Path) -> None:
    text = run(tmp_path, "lr", "--json")
    (found,) = [json.loads(line)["finding"] for line in text.splitlines() if line.startswith('{"finding')]
    assert found["code"] == "PL825"
    assert "lr is 0.01 on rank 0 and 0.02 on rank 1" in found["saw"]
    assert found["places"][0]["frames"][0]["line"] == STEP


@pytest.mark.slow
def test_a_mistake_of_each_rank_is_named_once(tmp_path: Path) -> None:
    text = run(tmp_path, "clear")
    assert text.count("[PL030]") == 1
    assert "backward()" in text


@pytest.mark.slow
def test_advice_is_for_those_who_ask(tmp_path: Path) -> None:
    assert "[PL" not in run(tmp_path, "none")
    assert "a step has 16 samples (2 ranks with 8, 1 backward pass), and lr is 0.01: " in run(
        tmp_path, "none", "--advice"
    )


@pytest.mark.slow
def test_nothing_is_said_without_the_watch(tmp_path: Path) -> None:
    assert "[PL" not in run(tmp_path, "lr", "--no-watch")
