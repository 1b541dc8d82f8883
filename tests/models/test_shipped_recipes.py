"""The recipes that come with the project: each builds its data and its model, and a step works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from paceline.data import build_data
from paceline.models import build_model
from paceline.recipe import load_recipe

FOLDER = Path(__file__).parents[2] / "recipes"
MODELS = {
    "gpt-stdlib": "Gpt",
    "gpt-islands": "Gpt",
    "moe-stdlib": "MoeGpt",
    "encoder-dropout": "Encoder",
    "resnet-digits": "Resnet",
}


@pytest.mark.parametrize(("name", "kind"), MODELS.items())
def test_recipe_builds_and_learns(name: str, kind: str, tmp_path: Path) -> None:
    text = FOLDER / f"{name}.toml"
    settings = [] if kind == "Resnet" else [f"data.cache_dir={tmp_path}"]
    recipe = load_recipe(text, settings)
    data = build_data(recipe)
    assert data.valid is not None
    torch.manual_seed(0)
    model = build_model(recipe, data)
    assert type(model).__name__ == kind
    samples = data.train.__getitems__(range(recipe.train.microbatch_size))
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    inputs, targets = ("images", "labels") if kind == "Resnet" else ("ids", "targets")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        output = model(batch[inputs])
        logits = output.logits if kind == "MoeGpt" else output
        loss = functional.cross_entropy(logits.flatten(0, -2), batch[targets].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_dropout_is_set_as_the_names_state() -> None:
    encoder = load_recipe(FOLDER / "encoder-dropout.toml").model
    assert encoder.kind == "encoder"
    assert encoder.dropout > 0
    gpt = load_recipe(FOLDER / "gpt-stdlib.toml").model
    assert gpt.kind == "gpt"
    assert gpt.dropout == 0
    assert "dropout" in (FOLDER / "gpt-stdlib.toml").read_text()


def test_every_recipe_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(MODELS)
