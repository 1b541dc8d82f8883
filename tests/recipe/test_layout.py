"""Layouts as text, and their fit to the number of ranks."""

from __future__ import annotations

import pytest

from paceline.codes import PAGES
from paceline.errors import PacelineError
from paceline.recipe import Layout


@pytest.mark.parametrize(
    ("text", "degree"),
    [
        ("", None),
        ("dp_replicate=2", 2),
        ("  dp_replicate=2  ", 2),
        ("dp_replicate=2 tp=1", 2),
        ("tp=1, dp_replicate=3", 3),
    ],
)
def test_parse(text: str, degree: int | None) -> None:
    assert Layout.parse(text) == Layout(dp_replicate=degree)


@pytest.mark.parametrize(
    ("text", "code", "saw"),
    [
        ("2", "PL110", "'2'"),
        ("dp_replicate", "PL110", "'dp_replicate'"),
        ("dp_replicate=", "PL110", "'dp_replicate='"),
        ("dp_replicate=two", "PL110", "'dp_replicate=two'"),
        ("dp_replicate=2.0", "PL110", "'dp_replicate=2.0'"),
        ("dp=2", "PL110", "'dp=2'"),
        ("dp_replicate = 2", "PL110", "'dp_replicate'"),
        ("dp_replicate=2 dp_replicate=4", "PL110", "names dp_replicate twice"),
        ("tp=2", "PL111", "layout.tp=2."),
        ("dp_replicate=2 pp=4", "PL111", "layout.pp=4."),
        ("dp_replicate=0", "PL112", "layout.dp_replicate=0."),
        ("dp_replicate=-2", "PL112", "layout.dp_replicate=-2."),
        ("tp=0", "PL112", "layout.tp=0."),
    ],
)
def test_parse_refuses(text: str, code: str, saw: str) -> None:
    with pytest.raises(PacelineError) as caught:
        Layout.parse(text)
    assert caught.value.code == code
    assert code in PAGES
    assert saw in caught.value.saw


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_resolve_fills_the_open_degree(world_size: int) -> None:
    assert Layout().resolve(world_size) == Layout(dp_replicate=world_size)
    assert Layout(dp_replicate=world_size).resolve(world_size) == Layout(dp_replicate=world_size)


@pytest.mark.parametrize(("degree", "world_size"), [(2, 1), (1, 2), (4, 6)])
def test_resolve_refuses_another_number_of_ranks(degree: int, world_size: int) -> None:
    with pytest.raises(PacelineError) as caught:
        Layout(dp_replicate=degree).resolve(world_size)
    assert caught.value.code == "PL113"
    assert f"dp_replicate={degree}" in caught.value.saw
    assert f"{world_size} rank" in caught.value.saw


def test_text_round_trip() -> None:
    layout = Layout.parse("dp_replicate=3")
    assert Layout.parse(str(layout)) == layout
    assert str(Layout()) == "dp_replicate=auto"
