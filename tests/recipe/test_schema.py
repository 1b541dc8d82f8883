"""The schema as a whole: documented, frozen, and the same after a round trip through TOML."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from paceline.errors import PacelineError, RecipeErrors
from paceline.recipe import Recipe, dump_recipe, parse_recipe
from paceline.recipe.explain import models_in
from paceline.recipe.layout import CHOICES

SECTIONS = [model for field in Recipe.model_fields.values() for model in models_in(field.annotation)]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_key_is_documented(section: type[BaseModel]) -> None:
    assert section.__doc__
    missing = [name for name, field in section.model_fields.items() if not field.description]
    assert not missing


def test_a_recipe_can_not_be_changed() -> None:
    recipe = parse_recipe({"model": {"kind": "gpt"}, "data": {"kind": "text"}, "train": {"steps": 1}})
    with pytest.raises(ValidationError, match="frozen"):
        recipe.train.steps = 2  # type: ignore[misc]


names = st.text(min_size=1, max_size=20).filter(lambda text: "\x00" not in text)
fractions = st.floats(0, 1, exclude_max=True)
positive = st.floats(1e-300, 1e300)


def sections(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


gpt = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 64)).flatmap(
    lambda sizes: sections(
        {
            "kind": st.just("gpt"),
            "heads": st.just(sizes[0] * sizes[1]),
            "hidden": st.just(sizes[0] * sizes[1] * 2 * sizes[2]),
        },
        {
            "kv_heads": st.just(sizes[0]),
            "dropout": fractions,
            "tie_embeddings": st.booleans(),
            "norm_eps": positive,
        },
    )
)
text = sections(
    {"kind": st.just("text")},
    {
        "files": st.lists(names, min_size=1, max_size=4),
        "seq_len": st.integers(1, 10**9),
        "valid_fraction": fractions,
        "cache_dir": names,
    },
)
train = sections(
    {"steps": st.integers(1000, 10**12), "global_batch_size": st.integers(4, 10**6)},
    {
        "microbatch_size": st.integers(1, 4),
        "dtype": st.sampled_from(["fp64", "fp32", "bf16", "fp16"]),
        "seed": st.integers(0, 2**63 - 1),
        "clip_norm": st.floats(0, 1e300),
        "threads_per_rank": st.integers(1, 64) | st.just("auto"),
        "eval_samples": st.integers(1, 100),
        "timeout_s": positive,
    },
)
optimizer = sections(
    {},
    {
        "lr": positive,
        "betas": st.lists(fractions, min_size=2, max_size=2),
        "warmup_steps": st.integers(0, 1000),
        "schedule": st.sampled_from(["constant", "linear", "cosine"]),
    },
) | sections({"kind": st.just("sgd")}, {"momentum": st.floats(0.1, 0.9), "nesterov": st.booleans()})
layout = sections(
    {},
    {
        "dp_replicate": st.integers(1, 10**4) | st.just("auto"),
        "dp_shard": st.integers(1, 10**4),
        "tp": st.integers(1, 64),
        **{word: st.sampled_from(choices) for word, choices in CHOICES.items()},
    },
)
shard = sections(
    {},
    {
        "prefetch": st.integers(0, 10),
        "param_dtype": st.sampled_from(["none", "bf16", "fp16"]),
        "reduce_dtype": st.sampled_from(["auto", "fp32"]),
    },
)
tables = sections(
    {"model": gpt, "data": text, "train": train}, {"optimizer": optimizer, "layout": layout, "shard": shard}
)


@settings(deadline=None)  # machines may be busy
@given(tables)
def test_dump_round_trip(table: dict[str, Any]) -> None:
    recipe = parse_recipe(table)
    again = parse_recipe(tomllib.loads(dump_recipe(recipe)))
    assert again == recipe


@given(tables)
def test_dump_is_the_same_for_equal_recipes(table: dict[str, Any]) -> None:
    recipe = parse_recipe(table)
    assert dump_recipe(parse_recipe(tomllib.loads(dump_recipe(recipe)))) == dump_recipe(recipe)


def test_dump_writes_kind_first_and_every_default() -> None:
    recipe = parse_recipe({"model": {"kind": "gpt"}, "data": {"kind": "text"}, "train": {"steps": 1}})
    table = tomllib.loads(dump_recipe(recipe))
    assert all(next(iter(section)) == "kind" for section in table.values() if "kind" in section)
    assert table["train"]["dtype"] == "fp32"
    assert table["checkpoint"]["keep"] == 3
    assert "epochs" not in table["train"]


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
known = st.sampled_from(sorted({name for section in SECTIONS for name in section.model_fields}))


@given(
    st.dictionaries(
        st.sampled_from([*Recipe.model_fields, "trian"]),
        st.dictionaries(known, anything | st.sampled_from(["gpt", "text", "adamw"]), max_size=6) | anything,
    )
)
def test_any_table_gives_a_recipe_or_recipe_errors(table: dict[str, Any]) -> None:
    problems: list[PacelineError] = []
    try:
        parse_recipe(table)
    except RecipeErrors as error:
        problems = error.problems or pytest.fail("refused without a problem")
    assert all(problem.saw and problem.rule and problem.fix for problem in problems)


def test_an_unknown_schedule_is_refused_with_its_name() -> None:
    with pytest.raises(PacelineError, match=r"layout\.schedule=1f1 was given"):
        parse_recipe({"model": {"kind": "gpt"}, "train": {"steps": 1}, "layout": {"schedule": "1f1"}})
