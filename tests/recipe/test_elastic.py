"""Recipes whose layout follows from the number of ranks: open degrees, and lists of layouts."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.recipe import dump_recipe, parse_recipe, settle_recipe
from paceline.recipe.schema import ShardSection

GPT: dict[str, Any] = {"model": {"kind": "gpt"}, "data": {"kind": "text"}, "train": {"steps": 10}}
TWO = 'elastic.layouts=["dp_shard=2 tp=2", "dp_replicate=1 tp=2"]'


def settle(world_size: int, *changes: str) -> tuple[str, int]:
    settled = settle_recipe(parse_recipe(GPT, changes), world_size)
    assert settled.recipe.list_layouts() == [settled.layout]
    assert settle_recipe(settled.recipe, settled.layout.num_ranks).layout == settled.layout
    return str(settled.layout), settled.num_spares


@pytest.mark.parametrize(
    ("changes", "world_size", "layout", "num_spares"),
    [
        ((), 3, "dp_replicate=3", 0),
        (("layout.dp_shard=auto",), 3, "dp_replicate=1 dp_shard=3", 0),
        (("layout.dp_shard=auto", "layout.dp_replicate=2"), 8, "dp_replicate=2 dp_shard=4", 0),
        ((TWO,), 7, "dp_replicate=1 dp_shard=2 tp=2", 3),
        ((TWO,), 3, "dp_replicate=1 tp=2", 1),
        ((TWO,), 2, "dp_replicate=1 tp=2", 0),
        # [layout] comes first where it says anything.
        ((TWO, "layout.tp=4", "layout.dp_replicate=2"), 8, "dp_replicate=2 tp=4", 0),
        ((TWO, "layout.tp=4", "layout.dp_replicate=2"), 7, "dp_replicate=1 dp_shard=2 tp=2", 3),
    ],
)
def test_the_first_layout_that_fits(
    changes: tuple[str, ...], world_size: int, layout: str, num_spares: int
) -> None:
    assert settle(world_size, *changes) == (layout, num_spares)


def test_a_list_stretches() -> None:
    assert settle(7, 'elastic.layouts=["dp_replicate=auto tp=2"]') == ("dp_replicate=3 tp=2", 1)


@pytest.mark.parametrize(
    ("changes", "world_size", "code", "words"),
    [
        (('elastic.layouts=["dp_shard=4 tp=2", "tp=4 dp_replicate=1"]',), 3, "PL129", "needs 4"),
        (('elastic.layouts=["tp=2", "dp_shard=4"]',), 4, "PL128", '"dp_replicate=auto dp_shard=4" (4 ranks)'),
        (('elastic.layouts=["tp=2", "tp=2 dp_shard=auto"]',), 4, "PL128", "(2 ranks)"),
        (("layout.dp_shard=auto", TWO), 4, "PL128", "after"),
        (('elastic.layouts=["tp=3", "tp=2"]',), 2, "PL132", "layout.tp=3"),
        (('elastic.layouts=["tp=x"]',), 2, "PL110", "elastic.layouts: layout has 'tp=x'"),
        (("elastic.layouts=tp", "layout.tp=2"), 2, "PL101", "elastic.layouts"),
        (('elastic.layouts=["dp_shard=auto dp_replicate=auto"]',), 2, "PL127", "dp_replicate"),
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


def test_settings_wait_for_a_layout_that_uses_them() -> None:
    asked = parse_recipe(
        GPT,
        [TWO, "shard.prefetch=0", "layout.tp=4", "layout.dp_replicate=2", "ddp.find_unused_parameters=true"],
    )
    on_two, on_four, on_eight = (settle_recipe(asked, ranks) for ranks in (2, 4, 8))
    assert on_two.recipe.shard == ShardSection()
    assert on_four.recipe.shard.prefetch == 0
    assert not on_four.recipe.ddp.find_unused_parameters
    assert on_eight.recipe.ddp.find_unused_parameters
    waiting = [remark.saw for remark in on_two.remarks if remark.code == "PL152"]
    assert waiting == ["ddp.find_unused_parameters=true, shard.prefetch=0 with layout dp_replicate=1 tp=2."]


def test_settings_of_shards_wait_for_ranks() -> None:
    asked = parse_recipe(GPT, ["layout.dp_shard=auto", "layout.zero=2", "layout.tp=2", "shard.prefetch=0"])
    (waiting,) = [remark.saw for remark in settle_recipe(asked, 2).remarks if remark.code == "PL152"]
    assert waiting == "layout.zero=2, shard.prefetch=0 with layout dp_replicate=1 tp=2."
    assert str(settle_recipe(asked, 4).layout) == "dp_replicate=1 dp_shard=2 tp=2 zero=2"


def test_a_resolved_recipe_means_the_same() -> None:
    for changes in (["layout.dp_shard=auto"], [TWO], []):
        asked = parse_recipe(GPT, changes)

        assert parse_recipe(tomllib.loads(dump_recipe(asked))) == asked
