"""From a recipe and its data to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.models import Encoder, Gpt, Resnet, build_model
from paceline.recipe import parse_recipe


@dataclass
class Shape:
    vocab_size: int | None = None
    tokens_per_sample: int | None = None
    num_classes: int | None = None
    image_shape: tuple[int, int, int] | None = None


TEXT = Shape(vocab_size=300, tokens_per_sample=20)
CASES: list[tuple[type, dict[str, Any], dict[str, Any], Shape]] = [
    (Gpt, {"kind": "gpt"}, {"kind": "text"}, TEXT),
    (Encoder, {"kind": "encoder"}, {"kind": "masked_text"}, TEXT),
    (Resnet, {"kind": "resnet"}, {"kind": "digits"}, Shape(num_classes=7, image_shape=(1, 8, 8))),
]


@pytest.mark.parametrize(("kind", "model", "data", "shape"), CASES)
def test_model_fits_its_data(kind: type, model: dict[str, Any], data: dict[str, Any], shape: Shape) -> None:
    recipe = parse_recipe({"model": model, "data": data, "train": {"steps": 1}})
    built = build_model(recipe, shape)
    assert type(built) is kind
    if shape.image_shape is not None:
        assert built(torch.zeros(2, *shape.image_shape)).shape == (2, 7)
    else:
        assert built(torch.full((2, 20), 299)).shape == (2, 20, 300)


def test_the_caller_seeds() -> None:
    recipe = parse_recipe({"model": {"kind": "gpt"}, "data": {"kind": "text"}, "train": {"steps": 1}})
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(build_model(recipe, TEXT).state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["embed_tokens.weight"], weights[2]["embed_tokens.weight"])
