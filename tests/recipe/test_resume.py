"""The keys of a recipe that may change when a run is resumed."""

from __future__ import annotations

import pytest

from paceline.errors import PacelineError
from paceline.recipe import (
    RESUMABLE,
    Recipe,
    check_accepted,
    check_resumable,
    find_key,
    list_changes,
    list_settings,
    parse_recipe,
)
from paceline.recipe.explain import models_in

TABLE = {"model": {"kind": "gpt"}, "data": {"kind": "text"}, "train": {"steps": 10}}


def recipe(*settings: str) -> Recipe:
    return parse_recipe(TABLE, settings)


def test_every_resumable_key_exists() -> None:
    for name in RESUMABLE:
        section, _, key = name.partition(".")
        assert section in Recipe.model_fields, name
        keys = [k for model in models_in(Recipe.model_fields[section].annotation) for k in model.model_fields]
        assert not key or key in keys, name


def test_every_resumable_key_has_its_reason() -> None:
    assert all(reason.strip() for reason in RESUMABLE.values())


def test_no_key_is_listed_twice() -> None:
    assert not [name for name in RESUMABLE if "." in name and name.partition(".")[0] in RESUMABLE]


def test_changes_are_listed_with_old_and_new() -> None:
    changes = list_changes(recipe(), recipe("optimizer.lr=0.5", "train.steps=none", "train.epochs=1"))
    assert changes == {"optimizer.lr": (1e-3, 0.5), "train.steps": (10, None), "train.epochs": (None, 1)}
    assert list(changes) == sorted(changes)
    assert list_changes(recipe(), recipe()) == {}


@pytest.mark.parametrize(
    "setting",
    [
        "train.steps=20",
        "train.device=cpu",
        "train.threads_per_rank=2",
        "layout.dp_replicate=2",
        "layout.tp=2",
        "layout.offload=cpu",
        "shard.prefetch=0",
        "ddp.bucket_cap_mb=1.0",
        "loader.num_workers=2",
        "checkpoint.every=1",
        "metrics.sinks=[]",
        "data.cache_dir=/somewhere/else",
    ],
)
def test_these_may_change(setting: str) -> None:
    assert recipe(setting) != recipe()
    check_resumable(recipe(), recipe(setting), where="runs/x")


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("optimizer.lr=0.5", "optimizer.lr: 0.001 there, 0.5 here"),
        ("train.seed=1", "train.seed: 0 there, 1 here"),
        ("train.microbatch_size=2", "train.microbatch_size: 4 there, 2 here"),
        ("train.dtype=fp64", "train.dtype: 'fp32' there, 'fp64' here"),
        ("model.layers=2", "model.layers: 4 there, 2 here"),
        ("data.seq_len=64", "data.seq_len: 128 there, 64 here"),
        ("shard.param_dtype=bf16", "shard.param_dtype: 'none' there, 'bf16' here"),
        ("shard.reduce_dtype=fp32", "shard.reduce_dtype: 'auto' there, 'fp32' here"),
    ],
)
def test_these_may_not(setting: str, shown: str) -> None:
    with pytest.raises(PacelineError) as caught:
        check_resumable(recipe(), recipe(setting), where="runs/x")
    assert caught.value.code == "PL530"
    assert shown in caught.value.saw
    assert "runs/x" in caught.value.saw


def test_a_refusal_shows_all_differences_and_only_those_that_matter() -> None:
    new = recipe("optimizer.lr=0.5", "model.layers=2", "train.steps=20")
    with pytest.raises(PacelineError) as caught:
        check_resumable(recipe(), new, where="runs/x")
    assert "optimizer.lr" in caught.value.saw
    assert "model.layers" in caught.value.saw
    assert "train.steps" not in caught.value.saw


@pytest.mark.parametrize("accept", [["optimizer.lr"], ["optimizer"], ["model.layers", "optimizer.lr"]])
def test_accepted_keys_may_change(accept: list[str]) -> None:
    check_resumable(recipe(), recipe("optimizer.lr=0.5"), where="runs/x", accept=accept)
    with pytest.raises(PacelineError) as caught:
        check_resumable(
            recipe(), recipe("optimizer.lr=0.5", "data.seq_len=64"), where="runs/x", accept=accept
        )
    assert "optimizer.lr" not in caught.value.saw
    assert caught.value.fix.endswith("--accept data.seq_len")


def test_the_seed_is_never_accepted() -> None:
    for accept, code in (["train.seed"], "PL517"), (["train"], "PL530"):
        with pytest.raises(PacelineError) as caught:
            check_resumable(recipe(), recipe("train.seed=1"), where="runs/x", accept=accept)
        assert caught.value.code == code
        assert "--accept train" not in caught.value.fix


def test_an_unknown_key_to_accept_is_an_error_with_near_ones() -> None:
    with pytest.raises(
        PacelineError, match=r"--accept optimizr\.lr, which is not a key.*optimizer\.lr.*PL517"
    ):
        check_accepted(["optimizr.lr"], recipe())


def test_every_key_that_may_be_accepted_has_its_settings() -> None:
    """Keys that end up in the trainer's settings stand for these, and the other way round."""
    keys = {
        "train.global_batch_size",
        "train.microbatch_size",
        "train.clip_norm",
        "train.dtype",
        "data",
        "optimizer",
    }
    settings = {key: list_settings([key]) for key in keys}
    assert all(settings.values())
    for key, names in settings.items():
        assert {find_key(name) for name in names} <= {key, "optimizer"}
    assert list_settings(["optimizer.lr"]) == list_settings(["optimizer"])
    assert set(list_settings(["train"])) >= {"dtype", "clip_norm", "train.global_batch_size"}
    assert list_settings(["model.dropout"]) == []
