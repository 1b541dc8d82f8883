"""An error that a user can fix ends a plain `python train.py` as one message with the user's line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.own_code import describe_place
from paceline.watch.protocol.report import Frame
from paceline.watch.protocol.words import name_line

SCRIPT = """
import paceline
with paceline.start():
    def take_a_step():
        raise {error}
    take_a_step()
"""


def run(error: str, folder: Path) -> str:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(error=error))
    done = subprocess.run(
        [sys.executable, script.name], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    return done.stderr


def test_a_mistake_is_one_message_with_the_line(tmp_path: Path) -> None:
    error = "paceline.PacelineError('PL413', saw='The loss is 1.', rule='It is 2.', fix='Make it 2.')"
    assert run(error, tmp_path).splitlines()[-2:] == [
        "[rank0]: paceline: The loss is 1. It is 2. Make it 2. [PL413]",
        "[rank0]:   at train.py:5 in take_a_step",
    ]


def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    printed = run("ValueError('torn')", tmp_path)
    assert "Traceback (most recent call last)" in printed
    assert printed.rstrip().endswith("ValueError: torn")


def test_a_folder_that_has_gone_hides_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    inside = str(folder / "train.py")
    assert describe_place(inside, 3, "load") == "train.py:3 in load"
    folder.rmdir()
    assert describe_place(inside, 3, "load") == f"{inside}:3 in load"
    assert name_line(Frame(inside, 3, "load")) == f"{inside}:3"
