"""Recipes whose model and data the user's own functions build: the losses of a plain loop, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from paceline.cli.main import main
from paceline.data import build_data
from paceline.errors import PacelineError
from paceline.recipe import dump_recipe, load_recipe
from paceline.train.run import make_model
from paceline.train.tasks import build_task

MODULE = """
import torch
from torch import nn

class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.x = torch.arange(8.0 * rows).reshape(rows, 8).sin()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        return {"x": self.x[place], "y": self.x[place].sum()}

def build(data, hidden=4):
    model = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    return model

def loss(output, batch):
    return (output[:, 0] - batch["y"]).square().sum(), len(output)

def read(rows=9):
    return {
        "train": Rows(rows),
        "valid": Rows(3),
        "forward": lambda model, batch: model(batch["x"]),
        "loss": loss,
        "metrics": {"error": lambda output, batch: ((output[:, 0] - batch["y"]).abs().sum(), len(output))},
    }

def classify(data, width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, data.num_classes))

def nothing(*_, **args):
    return None

def no_loss():
    return {"train": Rows(9)}

def unknown():
    return {"train": Rows(9), "loss": loss, "los": loss}
"""
RECIPE = """
[model]
kind = "own_parts:build"
args = {hidden = 6}
[data]
kind = "own_parts.py:read"
[train]
steps = 3
global_batch_size = 9
microbatch_size = 2
clip_norm = 0
[optimizer]
kind = "sgd"
lr = 0.05
momentum = 0.0
weight_decay = 0.0
schedule = "constant"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own_parts.py").write_text(MODULE)
    Path("recipe.toml").write_text(RECIPE)
    return tmp_path


def follow_by_hand() -> tuple[list[float], float, float]:
    """Return the losses of three steps on the whole data, and what the evaluation after them finds."""
    names: dict[str, Any] = {}
    exec(MODULE, names)
    model, rows, valid = names["build"](None, hidden=6), names["Rows"](9).x, names["Rows"](3).x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        loss = (model(rows)[:, 0] - rows.sum(1)).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rest = model(valid)[:, 0] - valid.sum(1)
    return losses, rest.square().mean().item(), rest.abs().mean().item()


def test_a_recipe_trains_a_model_and_data_of_ones_own(place: Path) -> None:
    losses, valid_loss, error = follow_by_hand()
    command = ["train", "recipe.toml", "--nproc", "2", "--out", "run", "--set", "layout.dp_shard=2"]
    assert main(command) == 0
    rows, evaluations = (
        [json.loads(line) for line in (place / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "evaluations.jsonl")
    )
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-6)
    assert evaluations[-1]["loss"] == pytest.approx(valid_loss, rel=1e-6)
    assert evaluations[-1]["error"] == pytest.approx(error, rel=1e-6)


def test_a_resolved_recipe_reads_back(place: Path) -> None:
    recipe = load_recipe("recipe.toml")
    assert (recipe.model.kind, recipe.data.kind) == ("own", "own")
    Path("resolved.toml").write_text(dump_recipe(recipe))
    assert load_recipe("resolved.toml") == recipe


def test_a_model_of_ones_own_learns_a_recipes_data(place: Path) -> None:
    recipe = load_recipe(
        "recipe.toml", ["model.kind=own_parts:classify", "model.args={}", "data={kind='digits'}"]
    )
    data = build_data(recipe)
    batch = default_collate([data.train[n] for n in range(4)])
    task = build_task(recipe, data)
    torch.manual_seed(0)
    model = make_model(recipe, data)()
    loss, weight = task.loss(task.forward(model, batch), batch)
    expected = torch.nn.functional.cross_entropy(model(batch["images"]), batch["labels"], reduction="sum")
    assert (loss.item(), float(weight)) == (expected.item(), 4.0)


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("model.build=nowhere:build", r"nowhere cannot be imported \(ModuleNotFoundError"),
        ("model.build=nowhere.py:build", r"nowhere.py cannot be imported \(FileNotFoundError"),
        ("model.build=own_parts:absent", r"own_parts has no function absent.*\[PL837\]"),
        ("model.args={width=3}", r"raised TypeError: build\(\) got an unexpected keyword"),
        ("model.build=own_parts:nothing", "own_parts:nothing returned a NoneType"),
        ("data.build=own_parts:nothing", "returned no dict with data sets that have a length"),
        ("data.build=own_parts:no_loss", "returned no function `loss`"),
        ("data.build=own_parts:unknown", "returned 'los', which is no part of it"),
        ("data.args={rows=3}", "PL214"),
        ("data.args={rows=0}", "Add data"),
        ("optimizer.kind=muon", "PL116"),
        ("model={kind='gpt'}", "PL116"),
    ],
)
def test_what_a_recipe_cannot_use_is_refused(place: Path, setting: str, part: str) -> None:
    Path("recipe.toml").write_text(RECIPE.replace("own_parts.py:read", "own_parts:read"))
    spelled = load_recipe("recipe.toml")
    Path("recipe.toml").write_text(dump_recipe(spelled))

    def build() -> None:
        recipe = load_recipe("recipe.toml", [setting])
        make_model(recipe, build_data(recipe))()

    with pytest.raises(PacelineError, match=part):
        build()
