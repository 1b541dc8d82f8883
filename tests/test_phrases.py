"""Phrases that messages share, and durations."""

from __future__ import annotations

import pytest

from paceline.phrases import first_line, name_some
from paceline.units import format_seconds, format_wait


def test_a_few_of_many_names() -> None:
    assert name_some(["a"]) == "a"
    assert name_some(["a", "b", "a", "c"]) == "a, b, c"
    assert name_some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert name_some(["a", "b", "c"], 1) == "a and 2 more"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError("\n  No such file.\nmore"), "No such file"),
        (ValueError(), "ValueError"),
        (KeyError("x" * 400), "'" + "x" * 299),
    ],
)
def test_the_first_line_of_an_error(error: Exception, line: str) -> None:
    assert first_line(error) == line


@pytest.mark.parametrize(
    ("seconds", "text", "wait"),
    [
        (0.0021, "2.1 ms", "0 s"),
        (62.4, "1 min 2 s", "62 s"),
        (250.0, "4 min 10 s", "4 min 10 s"),
        (7260.0, "2 h 1 min", "2 h 1 min"),
    ],
)
def test_durations(seconds: float, text: str, wait: str) -> None:
    assert format_seconds(seconds) == text
    assert format_wait(seconds) == wait
