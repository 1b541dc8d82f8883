"""`paceline train` from start to end under every layout: evaluation, sample text, checkpoint, export.

The losses, the weights and the sample text are those of one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file

from paceline.checkpoint import export_model, find_checkpoint, is_usable, verify
from paceline.recipe import Layout
from tests.cli.test_bad_input import RECIPE, paceline

SETTINGS = {"train.steps": 2, "train.microbatch_size": 1, "train.eval_samples": 4, "train.reduction": "fast"}
# With the settings of the recipe, by layout; the first one's ranks once ended with exit code 1.
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("cp=2", {}),
    ("dp_replicate=2", {}),
    ("dp_shard=2", {}),
    ("dp_shard=2 zero=1", {}),
    ("tp=2", {}),
    ("tp=2 sequence=true", {}),
    ("cp=2 cp_by=gather", {}),
    ("pp=2", {}),
    ("dp_replicate=2 cp=2", {}),
    ("dp_shard=2 cp=2", {}),
    ("cp=2 tp=2", {"model.heads": 4}),
    ("pp=2 tp=2", {}),
    ("pp=2 cp=2", {}),
]
pytestmark = pytest.mark.slow  # tests/train/test_hf_recipe.py trains a recipe under tp=2
Start = Callable[[str, dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return a function that trains under a layout, and returns the summary with the exported weights."""
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "text").mkdir()
    (folder / "text/0.txt").write_text("nobody is dropped, " * 200)
    (folder / "recipe.toml").write_text(RECIPE.replace("layers = 1", "layers = 2"))
    known: dict[str, dict[str, Any]] = {}

    def train(layout: str, settings: dict[str, Any]) -> dict[str, Any]:
        name = f"{layout}-{len(settings)}".replace(" ", "-")
        if name not in known:
            words = [f"{key}={json.dumps(value)}" for key, value in (SETTINGS | settings).items()]
            words += [f"layout.{word}" for word in layout.replace("by=", 'by="').split()]
            flags = [flag for word in words for flag in ("--set", word + '"' * (word.count('"') % 2))]
            num_ranks = str(Layout.parse(layout).fewest_ranks)
            started = ("train", "recipe.toml", "--json", "--out", name, "--nproc", num_ranks)
            done = paceline(folder, *started, *flags, timeout_s=200)
            assert done.returncode == 0, done.stderr
            known[name] = json.loads(done.stdout)
            path = find_checkpoint(folder / name)
            assert is_usable(verify(path))
            export_model(path, folder / f"{name}.safetensors", None)
            known[name]["weights"] = load_file(folder / f"{name}.safetensors")
            for each in ("tensorboard", "evaluations.jsonl", "metrics.jsonl"):
                assert (folder / name / each).exists()
        return known[name]

    return train


@pytest.mark.parametrize(("layout", "settings"), LAYOUTS)
def test_a_recipe_ends_as_in_one_process(layout: str, settings: dict[str, Any], start: Start) -> None:
    one, found = start("", settings), start(layout, settings)
    assert found["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert found["valid"] == pytest.approx(one["valid"], rel=1e-5)
    assert one["weights"].keys() == found["weights"].keys()
    for name, tensor in one["weights"].items():
        assert (found["weights"][name] - tensor).abs().max() < 1e-4, name
