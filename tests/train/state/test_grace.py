"""The warnings of saves that take longer than their grace, and of checkpoints on one disk each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.train.state.grace import Grace
from tests.train.cases import text_recipe


@pytest.fixture
def two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_GRACE_S", "2")


@pytest.mark.usefixtures("two_seconds")
def test_the_first_save_that_takes_too_long_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    grace = Grace(is_main=True)
    for save_s in (None, 1.9, 3.0, 4.0):
        grace.check(save_s)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "A save took 3.0 s, and after a stop signal ranks are killed within 2.0 s: "
    )
    assert "--grace-s" in record.getMessage()
    assert record.getMessage().endswith("[PL557]")


@pytest.mark.usefixtures("two_seconds")
@pytest.mark.parametrize(("rows", "told"), [((9.0, None, 1.0, None), ""), ((1.0, 9.0, None), "9.0 s")])
def test_a_resumed_run_knows_the_last_save(
    rows: tuple[float | None, ...], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [json.dumps({"step": step, "save_s": save_s}) for step, save_s in enumerate(rows, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 7, "sa']))
    Grace(is_main=True).read(tmp_path)
    Grace(is_main=False).read(tmp_path)
    Grace(is_main=True).read(tmp_path / "none")
    assert [told in record.getMessage() for record in caplog.records] == [True] * bool(told)


def test_nothing_is_said_where_no_limit_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PACELINE_GRACE_S", raising=False)
    Grace(is_main=True).check(1e9)
    assert caplog.records == []


@pytest.mark.slow
def test_a_run_reports_its_first_save_and_then_its_last_one(tmp_path: Path) -> None:
    recipe = text_recipe(tmp_path / "text")
    recipe["checkpoint"] = {"every": 1}
    lines = []
    for section, table in recipe.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    (tmp_path / "recipe.toml").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "paceline", "train", str(tmp_path / "recipe.toml"), "--nproc", "1"]
    texts = []
    for steps in (4, 5):
        done = subprocess.run(
            [*command, "--out", str(tmp_path / "run"), "--set", f"train.steps={steps}"],
            env={**os.environ, "PACELINE_GRACE_S": "0.001"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stderr)
    assert [text.count("[PL557]") for text in texts] == [1, 1], texts
    assert "A save took " in texts[0]
    assert "The last save of this run took " in texts[1]
    assert "killed within 1.0 ms" in texts[0]
