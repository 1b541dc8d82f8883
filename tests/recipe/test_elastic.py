"""Recipes whose layout follows from the number of ranks by an open degree."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.recipe import dump_recipe, parse_recipe, settle_recipe
from paceline.recipe.schema import ShardSection

GPT: dict[str, Any] = {"model": {"kind": "gpt"}, "data": {"kind": "text"}, "train": {"steps": 10}}


def settle(world_size: int, *changes: str) -> str:
    settled = settle_recipe(parse_recipe(GPT, changes), world_size)
    assert settled.recipe.layout.to_layout() == settled.layout
    assert settle_recipe(settled.recipe, world_size).layout == settled.layout
    return str(settled.layout)


@pytest.mark.parametrize(
    ("changes", "world_size", "layout"),
    [
        ((), 3, "dp_replicate=3"),
        (("layout.dp_shard=auto",), 3, "dp_replicate=1 dp_shard=3"),
        (("layout.dp_shard=auto", "layout.dp_replicate=2"), 8, "dp_replicate=2 dp_shard=4"),
        (("layout.tp=2",), 6, "dp_replicate=3 tp=2"),
    ],
)
def test_an_open_degree_follows_from_the_ranks(
    changes: tuple[str, ...], world_size: int, layout: str
) -> None:
    assert settle(world_size, *changes) == layout


@pytest.mark.parametrize(
    ("changes", "world_size", "code", "words"),
    [
        (('elastic.layouts=["tp=2"]',), 2, "PL100", "elastic"),
        (("layout.dp_shard=auto", "layout.dp_replicate=auto"), 2, "PL127", "leave it out"),
        (("layout.dp_shard=auto", "layout.tp=2"), 3, "PL113", "Start 2 or 4 ranks"),
        (("layout.dp_shard=auto", "layout.ep=x"), 3, "PL101", "layout.ep"),
    ],
)
def test_what_cannot_be_is_refused(changes: tuple[str, ...], world_size: int, code: str, words: str) -> None:
    with pytest.raises(PacelineError) as caught:
        settle(world_size, *changes)
    text = str(caught.value)
    assert f"[{code}]" in text, text
    assert words in text, text


def test_idle_ranks_are_a_remark() -> None:
    """A global batch of four microbatches has nothing for a fifth rank."""
    (idle,) = settle_recipe(parse_recipe(GPT, ["layout.dp_shard=auto"]), 5).remarks
    assert (idle.code, "4 microbatches for 5 data ranks" in idle.saw) == ("PL131", True)


def test_settings_of_shards_wait_for_ranks() -> None:
    asked = parse_recipe(GPT, ["layout.dp_shard=auto", "layout.zero=2", "layout.tp=2", "shard.prefetch=0"])
    on_two = settle_recipe(asked, 2)
    (waiting,) = [remark.saw for remark in on_two.remarks if remark.code == "PL152"]
    assert on_two.recipe.shard == ShardSection()
    assert waiting == "layout.zero=2, shard.prefetch=0 with layout dp_replicate=1 tp=2."
    assert str(settle_recipe(asked, 4).layout) == "dp_replicate=1 dp_shard=2 tp=2 zero=2"


def test_a_resolved_recipe_means_the_same() -> None:
    for changes in (["layout.dp_shard=auto"], []):
        asked = parse_recipe(GPT, changes)

        assert parse_recipe(tomllib.loads(dump_recipe(asked))) == asked
