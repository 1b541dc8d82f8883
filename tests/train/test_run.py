"""`train_recipe`: a whole run of a recipe, stopped and resumed, longer or again."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import find_checkpoint, hash_tensors
from paceline.errors import PacelineError
from paceline.recipe.load import parse_recipe
from paceline.train.run import count_steps, train_recipe
from paceline.train.state.run_folder import claim_run_folder
from paceline.train.stopping import Stopped
from tests.checkpoint.states import load_checkpoint
from tests.dist.pool import Pool, RankError
from tests.train.cases import digits_recipe, text_recipe


class Told:
    """A reporter that notes what it hears, and sends a signal after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.begins: list[dict[str, Any]] = []
        self.steps: list[int] = []
        self.evaluations: list[int] = []
        self.stop_after = stop_after

    def begin(self, **facts: Any) -> None:
        self.begins.append({key: value for key, value in facts.items() if key != "world"})

    def step(self, step: Any, num_steps: int, tokens_per_sample: int | None) -> None:
        assert num_steps >= step.number
        self.steps.append(step.number)
        if step.number == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluation(self, step: int, evaluation: Any) -> None:
        assert evaluation.loss > 0
        self.evaluations.append(step)


def run(
    world: Any,
    table: dict[str, Any],
    folder: str,
    settings: list[str],
    stop_after: int | None = None,
    accept: tuple[str, ...] = (),
) -> Any:
    told = Told(stop_after)
    try:
        summary = train_recipe(parse_recipe(table, settings), Path(folder), world, told, accept=accept)
    except Stopped as stopped:
        return stopped.step, told
    assert (summary is None) == (not world.is_main)
    if not world.is_main:
        assert not told.begins, "rank 0 alone reports"
    return asdict(summary) if summary else None, told


def model_hash(folder: Path) -> str:
    return hash_tensors(load_checkpoint(find_checkpoint(folder)).model)


@pytest.mark.parametrize(
    ("kind", "nproc", "reduction"),
    [
        ("gpt", 2, "fast"),
        ("gpt", 3, "fast"),
        ("gpt", 3, "exact"),
        ("encoder", 2, "fast"),
        ("resnet", 2, "exact"),
    ],
)
def test_stopped_and_resumed_recipes_end_in_the_same_bits(
    ranks: Pool, tmp_path: Path, kind: str, nproc: int, reduction: str
) -> None:
    """Nothing of a start may show in the numbers: not the counting of operations in its first step, which
    changes kernels, nor DDP's first buckets, which change the order of sums on three ranks."""
    table = digits_recipe() if kind == "resnet" else text_recipe(tmp_path / "data", kind)
    settings = ["train.steps=8", "train.eval_every=3", "train.eval_samples=4", "checkpoint.every=5"]
    settings += ["ddp.bucket_cap_mb=0.01", f"train.reduction={reduction}"]
    (whole, told), *_ = ranks.run(run, nproc, (table, str(tmp_path / "whole"), settings))
    assert told.steps == list(range(1, 9))
    assert told.evaluations == [3, 6, 8]
    stopped = ranks.run(run, nproc, (table, str(tmp_path / "parts"), settings, 2))
    assert [step for step, _ in stopped] == [3] * nproc
    (rest, told), *_ = ranks.run(run, nproc, (table, str(tmp_path / "parts"), settings))
    assert told.steps == [4, 5, 6, 7, 8]
    assert told.begins[0]["first_step"] == 3
    assert rest["losses"] == whole["losses"]
    assert rest["valid"] == whole["valid"]
    assert model_hash(tmp_path / "parts") == model_hash(tmp_path / "whole")
    check_summary(whole, kind, nproc)
    files = {path.name for path in (tmp_path / "whole").iterdir()}
    names = {"recipe.toml", "metrics.jsonl", "evaluations.jsonl", "checkpoints"}
    assert files == {".lock", ".saved", ".generation-00000001", *names}
    rows = [json.loads(line) for line in (tmp_path / "parts" / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 6, 8]


def check_summary(summary: dict[str, Any], kind: str, nproc: int) -> None:
    assert (summary["world_size"], summary["steps"], summary["skipped"]) == (nproc, 8, 0)
    assert len(summary["losses"]) == 8
    assert summary["num_parameters"] > 1000
    assert 0 < summary["step_s"] < 10
    assert 0 <= summary["data_share"] < 1
    assert 0 < summary["comm_share"] < 1
    assert summary["flops_per_s"] > 0
    assert summary["mfu"] is None
    is_text = kind != "resnet"
    assert (summary["tokens_per_s"] is not None) == is_text
    assert ("accuracy" in summary["valid"]) == (kind == "resnet")


def test_a_complete_run_is_reported_again_and_may_be_made_longer(ranks: Pool, tmp_path: Path) -> None:
    folder, table = str(tmp_path / "run"), digits_recipe()
    (first, _), _ = ranks.run(run, args=(table, folder, ["train.steps=3"]))
    before = model_hash(tmp_path / "run")
    (again, told), _ = ranks.run(run, args=(table, folder, ["train.steps=3"]))
    assert told.steps == []
    assert (again["losses"], again["valid"]) == (first["losses"], first["valid"])
    assert again["step_s"] is None
    assert model_hash(tmp_path / "run") == before
    # On one rank, to another length.
    ((longer, told),) = ranks.run(run, nproc=1, args=(table, folder, ["train.steps=5"]))
    assert told.steps == [4, 5]
    assert longer["losses"][:3] == first["losses"]
    assert len(longer["losses"]) == 5


def test_an_evaluation_is_written_once(ranks: Pool, tmp_path: Path) -> None:
    """A start goes on from a checkpoint after which another one has evaluated, and trained on."""
    args = (digits_recipe(), str(tmp_path), ["train.steps=4", "train.eval_every=2", "checkpoint.every=2"])
    ((whole, told),) = ranks.run(run, nproc=1, args=args)
    assert told.evaluations == [2, 4]
    newest = find_checkpoint(tmp_path)
    assert newest is not None
    shutil.rmtree(newest)
    ((again, told),) = ranks.run(run, nproc=1, args=args)
    assert (told.steps, told.evaluations) == ([3, 4], [4])
    assert again["valid"] == whole["valid"]
    rows = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4]


def test_epochs_count_ragged_ends(ranks: Pool, tmp_path: Path) -> None:
    settings = [
        "train.steps=none",
        "train.epochs=2",
        "train.global_batch_size=600",
        "train.microbatch_size=150",
    ]
    (summary, told), _ = ranks.run(run, args=(digits_recipe(), str(tmp_path / "run"), settings, 3))
    assert summary == 4, "stopped in the second epoch"
    (summary, told), _ = ranks.run(run, args=(digits_recipe(), str(tmp_path / "run"), settings))
    assert told.steps == [5, 6]
    assert summary["samples"] == 2 * 1438
    recipe = parse_recipe(digits_recipe(), settings)
    assert [count_steps(recipe, n) for n in (1438, 1200, 1)] == [6, 4, 2]
    assert count_steps(parse_recipe(digits_recipe()), 1438) == 20


def test_without_validation_data(ranks: Pool, tmp_path: Path) -> None:
    settings = ["train.steps=2", "data.valid_fraction=0.0", 'metrics.sinks=["tensorboard"]']
    (summary, told), _ = ranks.run(run, args=(digits_recipe(), str(tmp_path / "run"), settings))
    assert summary["valid"] is None
    assert told.evaluations == []
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_another_recipes_folder_is_refused_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    ranks.run(run, args=(digits_recipe(), folder, ["train.steps=2"]))
    with pytest.raises(RankError) as caught:
        ranks.run(run, args=(digits_recipe(), folder, ["train.steps=4", "optimizer.lr=0.2"]))
    for rank in (0, 1):
        error = caught.value.causes[rank]
        assert isinstance(error, PacelineError)
        assert error.code == "PL530"
        assert "optimizer.lr: 0.1 there, 0.2 here" in str(error)
        assert "train.steps" not in error.saw


def test_a_run_goes_on_with_accepted_values(ranks: Pool, tmp_path: Path) -> None:
    table, folder = digits_recipe(), tmp_path / "run"
    ranks.run(run, args=(table, str(folder), ["train.steps=2"]))
    changed = ["train.steps=4", "optimizer.lr=0.2", "train.global_batch_size=24", "train.clip_norm=0.5"]
    before = (folder / "recipe.toml").read_text()
    with pytest.raises(RankError) as caught:
        ranks.run(run, args=(table, str(folder), changed, None, ("optimizer", "train.clip_norm")))
    assert "train.global_batch_size" in str(caught.value.causes[0])
    assert "optimizer.lr" not in str(caught.value.causes[0])
    assert (folder / "recipe.toml").read_text() == before
    accepted = ("optimizer.lr", "train.clip_norm", "train.global_batch_size")
    (summary, _), _ = ranks.run(run, args=(table, str(folder), changed, None, accepted))
    assert summary["steps"] == 4
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[3]["samples"] - rows[2]["samples"] == 24
    ranks.run(run, args=(table, str(folder), ["train.steps=5", *changed[1:]]))  # it is the run's recipe now


def test_the_advice_for_a_recipe_is_what_to_accept(ranks: Pool, tmp_path: Path) -> None:
    """The recipe was accepted, and the start ended before its first checkpoint."""
    table, folder = digits_recipe(), tmp_path / "run"
    ranks.run(run, args=(table, str(folder), ["train.steps=2"]))
    changed = ["train.steps=4", "optimizer.lr=0.2", "train.clip_norm=0.5"]
    claim_run_folder(folder, parse_recipe(table, changed), accept=("optimizer", "train")).close()
    with pytest.raises(RankError) as caught:
        ranks.run(run, args=(table, str(folder), changed))
    error = caught.value.causes[0]
    assert isinstance(error, PacelineError)
    assert error.code == "PL515"
    assert error.fix.endswith("--accept train.clip_norm,optimizer")
    (summary, _), _ = ranks.run(
        run, args=(table, str(folder), changed, None, ("train.clip_norm", "optimizer"))
    )
    assert summary["steps"] == 4
