"""`keep_best` and `train.patience`: the checkpoint of the lowest value stays, and training stops in time."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.checkpoint import find_best
from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.recipe import parse_recipe
from paceline.train.run import train_recipe
from tests.checkpoint.states import load_checkpoint
from tests.dist.pool import Pool

VALUES = [5.0, 4.0, float("nan"), 4.5, 3.0, 3.5, 3.0, 9.0]


def train(world: Any, folder: str, values: list[float]) -> tuple[list[tuple[int, int]], list[int], Any]:
    trainer = paceline.Trainer(
        nn.Linear(2, 1),
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        keep=1,
    )
    loader = trainer.loader(torch.randn(64, 2), global_batch_size=8)
    trainer.resume(folder)
    noted = []
    for batch in loader:
        step = trainer.step(batch)
        if step.number > len(values):
            break
        best = trainer.keep_best(values[step.number - 1])
        noted.append((best.step, best.num_since))
        trainer.save(wait=True)
        if best.num_since >= 3:
            break
    kept = sorted(int(path.name[5:]) for path in (Path(folder) / "checkpoints").glob("step-*"))
    return noted, kept, trainer.best


def test_the_best_checkpoint_stays_also_when_resumed(ranks: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    first, *_ = ranks.run(train, nproc=2, args=(folder, VALUES[:4]))
    assert first[:2] == ([(1, 0), (2, 0), (2, 1), (2, 2)], [2, 4])
    second, *_ = ranks.run(train, nproc=1, args=(folder, VALUES))
    assert second[:2] == ([(5, 0), (5, 1), (5, 2), (5, 3)], [5, 8])
    assert second[2].value == 3.0
    assert find_best(folder).name == "step-00000005"


def differ(world: Any, folder: str) -> None:
    trainer = paceline.Trainer(
        nn.Linear(2, 1),
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    trainer.resume(folder)
    with pytest.raises(PacelineError, match="keep_best") as caught:
        trainer.keep_best(1.0 + world.rank)  # of this rank alone: one would save, the other not
    assert caught.value.code == "PL417"


def test_ranks_with_different_values_are_told(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(differ, nproc=2, args=(str(tmp_path),))


RECIPE = """
[model]
kind = "resnet"
blocks = [1]
width = 4
[data]
kind = "digits"
[train]
steps = 40
global_batch_size = 32
microbatch_size = 32
eval_every = 2
eval_samples = 32
patience = 2
[optimizer]
kind = "sgd"
lr = 100.0
[checkpoint]
every = 2
keep = 1
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *words], capture_output=True, text=True, timeout=120, check=False
    )


def train_here(world: Any, folder: str) -> int:
    summary = train_recipe(parse_recipe(tomllib.loads(RECIPE)), Path(folder), world, None)
    return 0 if summary is None else summary.steps


def test_a_recipe_stops_early_and_exports_its_best(ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    num_steps, _ = ranks.run(train_here, nproc=2, args=(str(folder),))
    rows = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    best = min(rows, key=lambda row: row["loss"])
    assert num_steps == rows[-1]["step"] == best["step"] + 4 < 40  # two evaluations that were not lower
    assert ranks.run(train_here, nproc=1, args=(str(folder),)) == [num_steps]  # a finished run
    out = tmp_path / "best.safetensors"
    assert main(["checkpoint", "export", str(folder), str(out), "--best"]) == 0
    state = load_checkpoint(folder / "checkpoints" / f"step-{best['step']:08}").model
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_file(out).items())


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ("train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--nproc", "2")
    done = run(*words, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "this was a dry run of one step" in done.stdout + done.stderr
    assert "files in" not in done.stdout
    assert "is removed again" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_patience_needs_evaluations() -> None:
    with pytest.raises(PacelineError) as caught:
        parse_recipe(tomllib.loads(RECIPE.replace("eval_every = 2", "")))
    assert caught.value.code == "PL846"
