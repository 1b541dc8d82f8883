"""`paceline train` as a person uses it: trained, stopped, gone on with, looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.main import main
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
        "tokens/s",
        "communication",
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
    for key in ("losses", "valid", "steps", "samples"):
        assert one[key] == two[key]
    assert one["step_s"] > 0
    assert two["step_s"] is None


def test_asynchronous_updates_are_replayed_on_other_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    settings = ["--set", "asynchronous.staleness=2", "--set", "train.reduction=exact"]
    assert main(["train", "recipe.toml", "--nproc", "2", "--out", "a", *settings]) == 0
    replay = ["train", "recipe.toml", "--replay-updates", "a/updates.jsonl", "--nproc", "1", "--out", "b"]
    assert main([*replay, *settings]) == 0
    hashes = []
    for name in ("a", "b"):
        capsys.readouterr()
        assert main(["checkpoint", "hash", name]) == 0
        hashes.append(capsys.readouterr().out)
    assert hashes[0] == hashes[1] != ""
    rows = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["staleness"] <= 2 and row["worker"] in (0, 1) for row in rows)
    assert main([*replay, *settings, "--set", "optimizer.lr=0.5"]) == 2
    assert "PL530" in capsys.readouterr().err


def test_islands_leave_out_the_ragged_end_of_an_epoch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    counts = {}
    for count in (1, 2):
        settings = [
            "train.steps=none",
            "train.epochs=3",
            "train.global_batch_size=8",
            "train.microbatch_size=1",
        ]
        settings += [f"islands.count={count}", "islands.every=2", "islands.warmup_steps=1"]
        words = [word for setting in settings for word in ("--set", setting)]
        out = f"out-{count}"
        assert main(["train", "recipe.toml", "--out", out, "--nproc", "1", *words]) == 0
        rows = [json.loads(line) for line in Path(f"{out}/metrics.jsonl").read_text().splitlines()]
        counts[count] = [row["samples"] for row in rows]
    assert len(counts[1]) == len(counts[2]) + 3  # one of each epoch
    assert counts[2] == [8 * (1 + step) for step in range(len(counts[2]))]
