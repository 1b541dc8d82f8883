"""A run whose number of ranks changes: the same samples in the same order, and the bits of one process."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from paceline.checkpoint import find_checkpoint, hash_stored, open_usable
from paceline.checkpoint.folder_names import list_checkpoints
from paceline.checkpoint.manifest import read_manifest
from paceline.data import build_data
from paceline.recipe import parse_recipe
from paceline.recipe.schema import Recipe
from paceline.train.run import build_loader, build_trainer, count_steps
from paceline.train.trainer import Trainer
from paceline.world import World
from tests.dist.pool import Pool, RankError
from tests.train.cases import text_recipe

NUM_SAMPLES = 93
STEPS = 12  # two epochs of 93 samples in batches of 16
# Ranks of each start, and the step after which it is lost; saves are of every second step.
STARTS = ((1, 3), (2, 5), (4, 7), (3, 9), (1, STEPS))


def take_steps(world: World, recipe: dict[str, Any], folder: Path, last: int) -> tuple[str, list[Any]]:
    """Resume, train to a step, and end without saving it; the layout, and the samples by step."""
    parsed: Recipe = parse_recipe(recipe)
    data = build_data(parsed)
    trainer: Trainer = build_trainer(parsed, data, count_steps(parsed, len(data.train)))
    loader = build_loader(parsed, trainer, data.train, train=True)
    trainer.resume(folder)
    used = []
    while trainer.step_number < last:
        for share in loader:
            places = [share.start + place for samples in share.samples for place in samples]
            step = trainer.step(share)
            used.append((step.number, step.epoch, places))
            if step.number % 2 == 0:
                trainer.save()
            if step.number >= last:
                break
    return str(trainer.layout), used


def hash_of(folder: Path) -> str:
    return hash_stored(open_usable(find_checkpoint(folder)).model)


@pytest.mark.parametrize(
    ("changes", "layouts"),
    [
        (
            {"layout": {"dp_shard": "auto", "zero": 2}},
            [
                "dp_replicate=1",
                *(f"dp_replicate=1 dp_shard={ranks} zero=2" for ranks in (2, 4, 3)),
                "dp_replicate=1",
            ],
        ),
        pytest.param({}, [f"dp_replicate={ranks}" for ranks, _ in STARTS], marks=pytest.mark.slow),
    ],
    ids=["shards", "replicas"],
)
def test_bits_of_one_process(
    ranks: Pool, tmp_path: Path, changes: dict[str, Any], layouts: list[str]
) -> None:
    recipe = text_recipe(tmp_path / "text")
    recipe["train"]["steps"] = STEPS
    ranks.run(take_steps, nproc=1, args=(recipe, tmp_path / "alone", STEPS))
    recipe |= changes
    found, used = [], {}
    for num_ranks, last in STARTS:
        results = ranks.run(take_steps, nproc=num_ranks, args=(recipe, tmp_path / "run", last))
        found.append(results[0][0])
        for rows in zip(*(steps for _, steps in results), strict=True):
            # A step that was lost is taken again: with the same samples.
            (number, epoch) = {row[:2] for row in rows}.pop()
            parts = {tuple(row[2]) for row in rows}  # ranks of pp see the same samples
            places = sorted(place for part in parts for place in part)
            assert used.setdefault((epoch, number), places) == places
        newest = read_manifest(find_checkpoint(tmp_path / "run"))
        assert newest.identity["layout"] == found[-1]
    assert found == layouts
    for epoch in range(2):
        places = [place for (own, _), part in used.items() if own == epoch for place in part]
        assert sorted(places) == list(range(NUM_SAMPLES)), f"epoch {epoch}"
    assert hash_of(tmp_path / "run") == hash_of(tmp_path / "alone")


def train_own_model(world: World, layout: str) -> str:
    """Return a trainer whose shards wait for more ranks, and the settings of shards with them."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    trainer = Trainer(
        model,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        loss=lambda output, _: output.square().mean(),
        layout=layout,
        shard={"prefetch": 0},
        example=torch.zeros(2, 8),
        microbatch_size=2,
    )
    assert math.isfinite(trainer.step(torch.ones(4, 8)).loss)
    return str(trainer.layout)


@pytest.mark.parametrize(
    ("layout", "num_ranks", "found"),
    [
        ("dp_shard=auto zero=2", 1, "dp_replicate=1"),
        ("dp_shard=auto tp=2 zero=2", 2, "dp_replicate=1 tp=2"),
        ("dp_shard=auto zero=2", 2, "dp_replicate=1 dp_shard=2 zero=2"),
    ],
)
def test_a_trainer_stretches(ranks: Pool, layout: str, num_ranks: int, found: str) -> None:
    assert ranks.run(train_own_model, nproc=num_ranks, args=(layout,)) == [found] * num_ranks


def test_a_trainer_refuses_what_the_ranks_do_not_divide(ranks: Pool) -> None:
    with pytest.raises(RankError, match="Start 2 or 4 ranks"):
        ranks.run(train_own_model, nproc=3, args=("dp_shard=auto tp=2",))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_killed_runs_go_on_with_other_numbers_of_ranks(tmp_path: Path, axis: str) -> None:
    """`paceline train` on 1, 2, 4, 3 and 1 ranks, each start ended by SIGKILL of all its processes."""
    recipe = text_recipe(tmp_path / "text")
    recipe["train"]["steps"] = 200
    lines = []
    for section, table in recipe.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    (tmp_path / "recipe.toml").write_text("\n".join(lines))
    command = [sys.executable, "-m", "paceline", "train", str(tmp_path / "recipe.toml")]
    command += ["--set", "checkpoint.every=5"]
    subprocess.run([*command, "--out", str(tmp_path / "alone"), "--nproc", "1"], check=True, timeout=200)
    command += ["--out", str(tmp_path / "run"), "--set", f"layout.{axis}=auto"]
    used, step = [], 0
    for num_ranks in (1, 2, 4, 3):
        with subprocess.Popen([*command, "--nproc", str(num_ranks)], start_new_session=True) as job:
            step = wait_for_step(tmp_path / "run", step + 35, job)
            processes = [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]
            for process in processes:
                process.send_signal(signal.SIGKILL)
            psutil.wait_procs(processes[:-1], timeout=20)
        used.append(read_manifest(find_checkpoint(tmp_path / "run")).identity["layout"])
    subprocess.run([*command, "--nproc", "1"], check=True, timeout=200)
    expected = [f"dp_replicate={ranks}" for ranks in (1, 2, 4, 3)]
    if axis == "dp_shard":
        expected = ["dp_replicate=1", *(f"dp_replicate=1 dp_shard={ranks}" for ranks in (2, 4, 3))]
    assert used == expected
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 201))
    assert hash_of(tmp_path / "run") == hash_of(tmp_path / "alone")


def wait_for_step(folder: Path, step: int, job: subprocess.Popen[bytes]) -> int:
    """Wait for a checkpoint of this step or a later one; return its step."""
    deadline = time.monotonic() + 120
    while (newest := max(list_checkpoints(folder / "checkpoints"), default=0)) < step:
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return newest
