"""Layouts as text, and their fit to the number of ranks."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.codes import read_pages
from paceline.errors import PacelineError
from paceline.recipe import Layout
from paceline.recipe.axes import list_axes
from paceline.recipe.layout import CHOICES
from paceline.recipe.schema import LayoutSection


@pytest.mark.parametrize(
    ("text", "degree"),
    [
        ("", None),
        ("dp_replicate=2", 2),
        ("  dp_replicate=2  ", 2),
        ("dp_replicate=2 tp=1", 2),
        ("tp=1, dp_replicate=3", 3),
        ("dp_replicate=auto", None),
    ],
)
def test_parse(text: str, degree: int | None) -> None:
    assert Layout.parse(text) == Layout(dp_replicate=degree)


@pytest.mark.parametrize(
    ("text", "copies"),
    [
        ("dp_shard=auto", 1),
        ("dp_replicate=2 dp_shard=auto", 2),
        ("ep=2 dp_shard=auto", 1),  # ep counts shards too
    ],
)
def test_one_degree_is_open(text: str, copies: int) -> None:
    layout = Layout.parse(text)
    assert (layout.open_axis, layout.dp_replicate) == ("dp_shard", copies)
    assert Layout.parse(str(layout)) == layout


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
        ("dp_replicate=2 ep=0", "PL112", "layout.ep=0."),
        ("pp=2 schedule=1f1", "PL118", "schedule=1f1"),
        ("pp=2 chunks=0", "PL118", "chunks=0"),
        ("dp_replicate=0", "PL112", "layout.dp_replicate=0."),
        ("dp_replicate=-2", "PL112", "layout.dp_replicate=-2."),
        ("tp=0", "PL112", "layout.tp=0."),
        ("tp=auto", "PL110", "'tp=auto'"),
        ("dp_replicate=auto dp_shard=auto", "PL127", 'dp_replicate="auto" with layout.dp_shard="auto"'),
        ("zero=0", "PL118", "zero=0"),
        ("sequence=yes", "PL118", "sequence=yes"),
        ("recompute=all", "PL118", "recompute=all"),
        ("offload=gpu", "PL118", "offload=gpu"),
        ("zero=2 zero=3", "PL110", "names zero twice"),
        ("zero", "PL110", "'zero'"),
    ],
)
def test_parse_refuses(text: str, code: str, saw: str) -> None:
    with pytest.raises(PacelineError) as caught:
        Layout.parse(text)
    assert caught.value.code == code
    assert code in read_pages()
    assert saw in caught.value.saw


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_resolve_fills_the_open_degree(world_size: int) -> None:
    assert Layout().resolve(world_size) == Layout(dp_replicate=world_size)
    assert Layout(dp_replicate=world_size).resolve(world_size) == Layout(dp_replicate=world_size)


@pytest.mark.parametrize(
    ("text", "world_size", "found"),
    [
        ("dp_shard=auto", 3, "dp_replicate=1 dp_shard=3"),
        ("dp_shard=auto tp=2", 8, "dp_replicate=1 dp_shard=4 tp=2"),
        ("dp_replicate=2 dp_shard=auto zero=2", 4, "dp_replicate=2 dp_shard=2 zero=2"),
        # Nothing is sharded, so there is nothing to select or to move.
        ("dp_shard=auto zero=2 offload=cpu", 1, "dp_replicate=1"),
        ("dp_shard=auto tp=2 zero=1", 2, "dp_replicate=1 tp=2"),
    ],
)
def test_resolve_fills_open_shards(text: str, world_size: int, found: str) -> None:
    assert str(Layout.parse(text).resolve(world_size)) == found


@pytest.mark.parametrize(
    ("text", "world_size", "near"),
    [
        ("dp_shard=auto tp=2", 3, "Start 2 or 4 ranks"),
        ("dp_shard=auto tp=4", 2, "Start 4 ranks"),
        ("dp_replicate=3 dp_shard=auto", 8, "Start 6 or 9 ranks"),
        ("dp_replicate=auto tp=2", 5, "Start 4 or 6 ranks"),
    ],
)
def test_resolve_names_the_nearest_numbers_of_ranks(text: str, world_size: int, near: str) -> None:
    with pytest.raises(PacelineError) as caught:
        Layout.parse(text).resolve(world_size)
    assert (caught.value.code, near in caught.value.fix) == ("PL113", True), caught.value


@pytest.mark.parametrize(("degree", "world_size"), [(2, 1), (1, 2), (4, 6)])
def test_resolve_refuses_another_number_of_ranks(degree: int, world_size: int) -> None:
    with pytest.raises(PacelineError) as caught:
        Layout(dp_replicate=degree).resolve(world_size)
    assert caught.value.code == "PL113"
    assert f"dp_replicate={degree}" in caught.value.saw
    assert f"{world_size} rank" in caught.value.saw


layouts = st.builds(
    Layout,
    dp_replicate=st.none() | st.integers(1, 4096),
    dp_shard=st.none() | st.integers(1, 4096),
    tp=st.integers(1, 64),
    **{name: st.sampled_from(choices) for name, choices in CHOICES.items()},
)


@given(layouts)
def test_text_round_trip(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def test_text_states_what_is_not_the_default() -> None:
    assert str(Layout()) == "dp_replicate=auto"
    text = "dp_replicate=2 dp_shard=2 tp=4 zero=2 sequence=true recompute=block offload=cpu"
    assert str(Layout.parse(text)) == text
    assert str(Layout.parse("dp_replicate=2 zero=3 offload=none")) == "dp_replicate=2"


@given(layouts)
def test_a_recipe_states_the_same_as_the_text(layout: Layout) -> None:
    values = {field.name: getattr(layout, field.name) for field in fields(Layout)}
    table = {name: "auto" if value is None else value for name, value in values.items()}
    assert LayoutSection.model_validate(table).to_layout() == layout


def test_the_recipe_has_the_words_and_defaults_of_the_text() -> None:
    assert LayoutSection().to_layout() == Layout()
    assert set(LayoutSection.model_fields) == {*list_axes(), *CHOICES}
