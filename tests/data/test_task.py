"""From a recipe to data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.data import TaskData, build_data
from paceline.data.text import MaskedTokens, NextTokens
from paceline.models import build_model
from paceline.recipe import parse_recipe
from tests.train.cases import digits_recipe


def task(tmp_path: Path, model: str, kind: str, **keys: Any) -> TaskData:
    (tmp_path / "a.txt").write_text("so many words, and a cat \u20ac\n" * 100, encoding="utf-8")
    data = {
        "kind": kind,
        "files": [str(tmp_path / "a.txt")],
        "cache_dir": str(tmp_path / "cache"),
        "seq_len": 32,
    } | keys
    recipe = parse_recipe({"model": {"kind": model}, "data": data, "train": {"steps": 1, "seed": 5}})
    return build_data(recipe)


def test_text(tmp_path: Path) -> None:
    data = task(tmp_path, "gpt", "text")
    assert isinstance(data.train, NextTokens)
    assert not isinstance(data.train, MaskedTokens)
    assert (data.vocab_size, data.tokens_per_sample, data.num_classes) == (256, 32, None)
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.train[0]["ids"].tolist()) == "so many words, and a cat \u20ac\nso "
    assert 32 * len(data.train) == pytest.approx(0.95 * 2900, abs=90)


def test_masked_text_has_one_more_token(tmp_path: Path) -> None:
    data = task(tmp_path, "encoder", "masked_text", mask_fraction=0.5)
    assert data.vocab_size == 257
    assert isinstance(data.train, MaskedTokens)
    assert isinstance(data.valid, MaskedTokens)
    assert (data.train.seed, data.train.mask_fraction, data.train.mask_id) == (5, 0.5, 256)
    assert (data.train.fixed, data.valid.fixed) == (False, True)


def test_tokenizers_vocabulary(tmp_path: Path) -> None:
    assert task(tmp_path, "gpt", "text", tokenizer="bpe", vocab_size=270).vocab_size == 270
    tokenizer = next((tmp_path / "cache").glob("*/tokenizer.json"))
    data = task(tmp_path, "encoder", "masked_text", tokenizer=str(tokenizer))
    assert data.vocab_size == 271


def test_without_validation(tmp_path: Path) -> None:
    data = task(tmp_path, "gpt", "text", valid_fraction=0.0)
    assert data.valid is None


def test_models_are_built_from_it(tmp_path: Path) -> None:
    data = {"kind": "digits"}
    recipe = parse_recipe({"model": {"kind": "resnet"}, "data": data, "train": {"steps": 1}})
    digits = build_data(recipe)
    model = build_model(recipe, digits)
    assert model(digits.train[0]["images"][None]).shape == (1, 10)


def test_overfit_batches_keeps_the_first_global_batches() -> None:
    def load(num_batches: int) -> TaskData:
        table = digits_recipe()
        table["train"] |= {"overfit_batches": num_batches, "global_batch_size": 30}
        return build_data(parse_recipe(table))

    whole, two = load(0), load(2)
    assert len(two.train) == 60  # type: ignore[arg-type]
    assert all(torch.equal(two.train[i]["images"], whole.train[i]["images"]) for i in range(60))
    assert len(load(10_000).train) == len(whole.train)  # type: ignore[arg-type]
