"""`paceline compare`: what it says of two runs, and what it exits with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main


def write(folder: Path, losses: list[float], speed: float) -> str:
    folder.mkdir()
    # A spread of 2% around the speed, as on an idle machine.
    rows = [
        {"step": n, "loss": loss, "samples_per_s": speed * (1 + 0.01 * (n % 3 - 1))}
        for n, loss in enumerate(losses, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def compare(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["compare", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_speed_and_losses_have_a_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [2.0 - 0.01 * n for n in range(50)]
    a = write(tmp_path / "a", losses, 100.0)
    same = write(tmp_path / "same", losses[:40], 99.0)
    slow = write(tmp_path / "slow", losses, 80.0)
    high = write(tmp_path / "high", [*losses[:30], *(loss * 1.2 for loss in losses[30:])], 100.0)
    code, found = compare(capsys, a, same, "--max-regression", "5%")
    assert (code, found["common_steps"], found["first_difference"]) == (0, 40, None)
    assert found["speed"] == pytest.approx(0.99)
    low, top = found["speed_interval"]
    assert 0.96 < low <= 0.99 <= top < 1.02
    code, found = compare(capsys, a, slow, "--max-regression", "5%")
    assert code == 1
    assert "80.0% of the speed" in found["worse"][0]
    code, found = compare(capsys, a, high, "--max-regression", "5")
    assert (code, found["first_difference"], len(found["worse"])) == (1, 31, 1)
    assert compare(capsys, a, slow)[0] == 0
    assert main(["compare", a, slow]) == 0
    assert "speed of B / A   0.800" in capsys.readouterr().out


def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", [1.0, 0.5], 10.0)
    (tmp_path / "empty").mkdir()
    for words in ([a, str(tmp_path / "empty")], [a, str(tmp_path / "none")], [a, a, "--max-regression", "x"]):
        assert main(["compare", *words]) == 2
        assert "PL740" in capsys.readouterr().err
