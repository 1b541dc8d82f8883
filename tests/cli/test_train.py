"""`paceline train` as a person uses it: trained, stopped, gone on with, looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_bad_input import RECIPE, paceline


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text("nobody is dropped, " * 40 + str(number))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def test_a_run_ends_with_a_report_and_plain_files(folder: Path) -> None:
    done = paceline(folder, "train", "recipe.toml", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    for told in (
        "training loss",
        "validation loss",
        "a bigram model",
        "tokens/s",
        "communication",
        "a sample",
    ):
        assert told in done.stdout
    assert "step 4/4" in done.stderr
    run = folder / "runs/recipe"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    wanted = {"loss", "grad_norm", "lr", "samples", "tokens", "step_s", "data_s", "comm_s", "memory_bytes"}
    assert wanted <= rows[0].keys()
    assert rows[0]["flops_per_s"] > 0
    for name in ("recipe.toml", "evaluations.jsonl", "logs/rank-0000.log", "logs/rank-0001.log"):
        assert (run / name).exists()
    assert list((run / "tensorboard").iterdir())
    assert (run / "checkpoints/step-00000004").is_dir()


def test_a_run_goes_on_longer_on_another_number_of_ranks_looking_elsewhere(folder: Path) -> None:
    assert paceline(folder, "train", "recipe.toml", "--nproc", "2").returncode == 0
    settings = ["--set", "train.steps=6", "--set", "train.eval_samples=2", "--set", "train.eval_every=1"]
    done = paceline(folder, "train", "recipe.toml", "--nproc", "1", *settings)
    assert done.returncode == 0, done.stderr
    assert "resuming after step 4 of " in done.stderr
    assert "over 2 samples" in done.stderr
    rows = (folder / "runs/recipe/metrics.jsonl").read_text().splitlines()
    assert len(rows) == 6


def test_a_complete_run_is_reported_again(folder: Path) -> None:
    first = paceline(folder, "train", "recipe.toml", "--json")
    assert first.returncode == 0, first.stderr
    again = paceline(folder, "train", "recipe.toml", "--json")
    assert again.returncode == 0, again.stderr
    one, two = json.loads(first.stdout), json.loads(again.stdout)
    for key in ("losses", "valid", "bigram_loss", "sample", "steps", "samples"):
        assert one[key] == two[key]
    assert one["step_s"] > 0
    assert two["step_s"] is None


def test_asynchronous_updates_are_replayed_on_other_ranks(folder: Path) -> None:
    settings = ["--set", "asynchronous.staleness=2", "--set", "train.reduction=exact"]
    done = paceline(folder, "train", "recipe.toml", "--nproc", "2", "--out", "a", *settings)
    assert done.returncode == 0, done.stderr
    replay = ["--replay-updates", "a/updates.jsonl", "--nproc", "1", "--out", "b"]
    done = paceline(folder, "train", "recipe.toml", *replay, *settings)
    assert done.returncode == 0, done.stderr
    hashes = [paceline(folder, "checkpoint", "hash", name).stdout for name in ("a", "b")]
    assert hashes[0] == hashes[1] != ""
    rows = [json.loads(line) for line in (folder / "a/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["staleness"] <= 2 and row["worker"] in (0, 1) for row in rows)
    done = paceline(folder, "train", "recipe.toml", *replay, *settings, "--set", "optimizer.lr=0.5")
    assert done.returncode == 2
    assert "PL530" in done.stderr


def test_islands_leave_out_the_ragged_end_of_an_epoch(folder: Path) -> None:
    recipe = (folder / "recipe.toml").read_text().replace("steps = 4", "epochs = 3")
    (folder / "recipe.toml").write_text(recipe)
    words = ["--set", "train.global_batch_size=8", "--set", "train.microbatch_size=1", "--nproc", "1"]
    counts = {}
    for count in (1, 2):
        islands = [
            "--set",
            f"islands.count={count}",
            "--set",
            "islands.every=2",
            "--set",
            "islands.warmup_steps=1",
        ]
        done = paceline(folder, "train", "recipe.toml", "--out", f"out-{count}", *words, *islands)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in (folder / f"out-{count}/metrics.jsonl").read_text().splitlines()]
        counts[count] = [row["samples"] for row in rows]
    assert len(counts[1]) == len(counts[2]) + 3  # one of each epoch
    assert counts[2] == [8 * (1 + step) for step in range(len(counts[2]))]
