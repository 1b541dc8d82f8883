"""Numbers of `paceline run`'s flags that cannot be, refused before anything starts."""

from __future__ import annotations

import pytest

from paceline.cli.main import main


@pytest.mark.parametrize(
    "words", [("--threads-per-rank", "0"), ("--detect-s", "0.1"), ("--join-timeout", "-1")]
)
def test_a_number_that_is_too_small(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words, "script.py"]) == 2
    error = capsys.readouterr().err
    assert error.count("PL345") == 1
    assert f"{words[0]} {words[1]}." in error
