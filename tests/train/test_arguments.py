"""One list says which arguments ranks compare and which a resumed run keeps."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.replicate import ReplicaSettings
from paceline.parallel.shard.setup import ShardSettings
from paceline.recipe import SETTINGS, Layout, Recipe
from paceline.recipe.explain import field_at
from paceline.recipe.ranks import DdpSection, ShardSection
from paceline.train.arguments import Arguments
from paceline.train.trainer import Trainer
from paceline.world import start

# Compared otherwise (models and optimizers by what they are), or only about what rank 0 writes.
NOT_LISTED = {"optimizer", "tokens_per_sample", *(each.argument for each in SETTINGS if each.is_local)}
# Code, sections and what has no key of a recipe.
ONLY_OF_A_TRAINER = {
    *(
        "model",
        "optimizer",
        "forward",
        "loss",
        "step",
        "schedule",
        "example",
        "ema",
        "islands",
        "loss_over",
    ),
    *("layout", "metrics", "shard", "ddp", "compress", "tokens_per_sample", "recipe_toml"),
}


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def lose(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.sum(), len(output)


@pytest.fixture
def _started() -> Iterator[None]:
    """Start a world of one, whose nodes the settings of a compression depend on."""
    with start(device="cpu"):
        yield


def build(**settings: Any) -> Arguments:
    known = {name: each.default for name, each in inspect.signature(Trainer).parameters.items()}
    del known["example"]
    return Arguments(**{**known, "model": nn.Linear(2, 2), "optimizer": sgd, "seed": 0, **settings})


def test_a_trainer_keeps_every_argument_that_it_is_given() -> None:
    known = set(inspect.signature(Trainer).parameters)
    assert known - {field.name for field in fields(Arguments)} == {"example"}
    with start(device="cpu", seed=5):
        given = Trainer(nn.Linear(2, 2), optimizer=sgd, loss=lose, clip_norm=0.5, keep=7)._given
        other = Trainer(nn.Linear(2, 2), optimizer=sgd, loss=lose, seed=6)._given
    assert (given.loss, given.clip_norm, given.keep, given.seed) == (lose, 0.5, 7, 5)
    assert (other.clip_norm, other.keep, other.seed) == (0.0, 3, 6)


def test_the_table_of_settings_names_what_a_recipe_and_a_trainer_share() -> None:
    """An argument has the default of its key, except for those below."""
    known, defaults = inspect.signature(Trainer).parameters, {}
    for each in SETTINGS:
        section, _, _ = each.key.partition(".")
        assert section in Recipe.model_fields, each.key
        field = field_at(each.key)
        assert field is not None, each.key
        if each.argument and field.default != known[each.argument].default:
            defaults[each.argument] = (field.default, known[each.argument].default)
    found = {each.argument for each in SETTINGS if each.argument}
    assert known.keys() - found == ONLY_OF_A_TRAINER
    # A trainer takes whole shares and the world's seed; a script asks for clipping and event files itself.
    assert defaults == {
        "microbatch_size": (4, None),
        "clip_norm": (1.0, 0.0),
        "seed": (0, None),
        "sinks": (["tensorboard"], ()),
    }


@pytest.mark.usefixtures("_started")
def test_every_argument_is_compared_or_known_not_to_be() -> None:
    given = build(compress={"kind": "bf16", "slots": 2}, islands={"count": 2}).describe_for_ranks(
        Layout().resolve(2)
    )
    compared = {name.partition(".")[0] for name in given}
    names = {field.name.replace("recipe_toml", "recipe") for field in fields(Arguments)}
    assert names - compared == NOT_LISTED
    assert compared <= names


@pytest.mark.usefixtures("_started")
def test_a_resumed_run_keeps_what_its_result_depends_on() -> None:
    kept = build(clip_norm=0.5).describe_for_resume(Layout(), {})
    assert set(kept) == {
        "dtype",
        "microbatch_size",
        "clip_norm",
        "seed",
        "loss_over",
        "ema",
    }
    assert kept["clip_norm"] == 0.5


@pytest.mark.usefixtures("_started")
def test_the_settings_of_replicas_and_shards_are_those_of_a_recipe() -> None:
    assert asdict(ReplicaSettings()) == DdpSection().model_dump()
    assert asdict(ShardSettings()) == ShardSection().model_dump()
    settings = build(ddp={"bucket_cap_mb": 1.5}, shard={"prefetch": 3}).lay_out(Layout(), None)
    assert settings.ddp == ReplicaSettings(bucket_cap_mb=1.5)
    assert settings.shard == ShardSettings(prefetch=3)
