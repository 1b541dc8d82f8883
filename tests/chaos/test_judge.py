"""The judge finds faults: a chaos run that cannot fail would show nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import CheckpointFolder
from tests.chaos import run as chaos
from tests.chaos.judge import Outcome, Tally, count_differing_bits, read_outcome
from tests.chaos.start import Start
from tests.checkpoint.states import save


def outcome() -> Outcome:
    state = {
        "model.weight": torch.tensor([1.0, 2.0]),
        "state.count": 7,
        "state.loss": 0.5,
        "state.rng": torch.arange(4, dtype=torch.uint8),
        "state.nan": float("nan"),
    }
    rows = [{"step": 1, "loss": 0.25, "skipped": None}, {"step": 2, "loss": 0.125, "skipped": None}]
    return Outcome("ab" * 32, state, rows, [{"step": 2, "loss": 1.5}])


def test_the_same_outcome_differs_in_nothing() -> None:
    assert count_differing_bits(outcome(), outcome()) == {}


def flip(tensor: torch.Tensor, place: int) -> None:
    tensor.view(torch.uint8)[place] ^= 1


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("weights' hash", lambda it: it.__dict__.update(hash="cd" * 32)),
        ("model.weight", lambda it: flip(it.state["model.weight"], 5)),
        ("state.rng", lambda it: flip(it.state["state.rng"], 3)),
        ("state.count", lambda it: it.state.update({"state.count": 8})),
        ("state.count", lambda it: it.state.pop("state.count")),
        ("state.more", lambda it: it.state.update({"state.more": None})),
        ("state.loss", lambda it: it.state.update({"state.loss": 0.5 + 2**-53})),
        ("model.weight", lambda it: it.state.update({"model.weight": torch.tensor([1.0])})),
        ("metrics.jsonl step 2 loss", lambda it: it.rows[1].update(loss=0.125 + 2**-55)),
        ("rows of metrics.jsonl", lambda it: it.rows.pop()),
        ("rows of evaluations.jsonl", lambda it: it.evaluations.clear()),
    ],
)
def test_one_difference_is_one_bit(path: str, change: Any) -> None:
    ours = copy.deepcopy(outcome())
    change(ours)
    assert count_differing_bits(ours, outcome()) == {path: 1}


def test_an_outcome_is_read_with_all_its_state(tmp_path: Path) -> None:
    save(CheckpointFolder(tmp_path, keep=1), 5)
    row = {"step": 5, "epoch": 0, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "samples": 3, "skipped": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row | {"step_s": 0.3}) + "\n")
    read = read_outcome(tmp_path)
    assert read.rows == [row]
    assert {"step", "model.head.weight", "state.data.position[0]", "state.raw"} <= read.state.keys()
    assert count_differing_bits(read, read_outcome(tmp_path)) == {}
    save(CheckpointFolder(tmp_path, keep=1), 6)
    differing = count_differing_bits(read_outcome(tmp_path), read)
    assert {"step", "model.head.weight", "state.rng.numpy", "state.raw", "weights' hash"} <= differing.keys()


def test_a_run_that_differs_is_wrong() -> None:
    tally = Tally(save_every=4)
    tally.note_end("001", "fast on 2 ranks", {})
    assert tally.is_good
    tally.note_end("002", "fast on 2 ranks", {"model.weight": 3, "state.rng": 2})
    assert (tally.differing_bits, tally.differing_runs) == (5, 1)
    assert "run 002" in tally.wrong[0]


@pytest.mark.parametrize(
    ("step", "logged", "usable", "damaged", "wrong"),
    [
        (8, 12, {4, 8}, set(), None),
        (0, 4, set(), set(), None),
        (0, 5, set(), set(), "lost 5 steps"),
        (8, 13, {4, 8}, set(), "lost 5 steps"),
        (4, 12, {4, 8}, set(), "lost 8 steps"),
        (4, 12, {4}, {8}, None),
        (4, 13, {4}, {8}, "lost 9 steps"),
        (8, 12, {4}, {8}, "corrupt"),
        (8, 12, {4}, set(), "corrupt"),
    ],
)
def test_where_a_start_may_go_on_from(
    step: int, logged: int, usable: set[int], damaged: set[int], wrong: str | None
) -> None:
    tally = Tally(save_every=4)
    tally.note_resume("000-01", step, logged, usable, damaged)
    assert tally.is_good == (wrong is None), tally.wrong
    assert wrong is None or wrong in tally.wrong[0]
    assert tally.corrupt_loaded == (wrong == "corrupt")
    lost = logged - step
    assert (tally.most_lost_to_damage if damaged and step < 8 else tally.most_lost) == lost


@pytest.mark.parametrize(
    ("start", "wrong"),
    [
        (Start("a", 1, status=0), None),
        (Start("a", 1, status=1, killed="rank 0", stderr="Traceback"), None),
        (Start("a", 1, status=0, killed="pump"), None),
        (Start("a", 1, status=2, fault="fill the disk", stderr="The disk is full [PL508]"), None),
        (Start("a", 1, status=0, fault="fail a write", stderr="Training goes on [PL508]"), None),
        (Start("a", 1, status=None, killed="rank 0"), "hung"),
        (Start("a", 1, status=2, stderr="in use [PL533]"), "nothing was done to it"),
        (Start("a", 1, status=0, stderr="Traceback"), "traceback"),
        (Start("a", 1, status=0, fault="fail a write"), "without PL508"),
        (Start("a", 1, status=1, fault="remove a file", stderr="Traceback"), "traceback"),
        (Start("a", 1, status=1, fault="remove a file", stderr="OSError"), "without PL508"),
    ],
)
def test_how_a_start_may_end(start: Start, wrong: str | None) -> None:
    tally = Tally(save_every=4)
    tally.note_start(start)
    assert tally.is_good == (wrong is None), tally.wrong
    assert wrong is None or wrong in tally.wrong[0]


def test_corrupt_commits_and_leftovers_are_wrong() -> None:
    tally = Tally(save_every=4)
    tally.note_committed("a", [])
    tally.note_leftovers("001", [])
    tally.note_shared_memory({"sem.mp-a": 32}, 1)
    assert tally.is_good
    tally.note_committed("a", ["step-00000004 is corrupt"])
    tally.note_leftovers("001", ["process 12"])
    tally.note_shared_memory({"sem.mp-a": 32, "sem.mp-b": 32}, 1)
    tally.note_shared_memory({"torch_1": 4096}, 1)
    assert (tally.corrupt_committed, tally.leftovers, len(tally.wrong)) == (1, 1, 4)


@pytest.mark.parametrize("how", ["flip a bit", "cut a file", "remove a file"])
def test_damage_is_seen(how: str, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for where in (0.0, 0.5, 0.999):
        for name in ("manifest.json", "part-00000.safetensors", "state.json"):
            save(folder, 1)
            path = save(folder, 2)
            assert chaos.check_checkpoints(tmp_path, set()) == ({1, 2}, [])
            chaos.damage(path / name, how, where)
            usable, corrupt = chaos.check_checkpoints(tmp_path, set())
            assert (usable, len(corrupt)) == ({1}, 1)
            assert chaos.check_checkpoints(tmp_path, {2}) == ({1}, [])


def test_the_command_fails_when_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def see_nothing(self: chaos.Chaos, cases: Any, num_kills: int) -> None:
        self.tally.kills["rank 0"] += num_kills

    def see_a_difference(self: chaos.Chaos, cases: Any, num_kills: int) -> None:
        self.tally.note_end("000", "fast on 1 ranks", {"model.weight": 1})

    monkeypatch.setattr(chaos.Chaos, "check_shared_memory", lambda self: None)
    monkeypatch.setattr(chaos.Chaos, "run", see_nothing)
    assert chaos.main(["--keep", str(tmp_path), "--kills", "3"]) == 0
    assert "3 kills" in capsys.readouterr().out
    monkeypatch.setattr(chaos.Chaos, "run", see_a_difference)
    assert chaos.main(["--keep", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["differing_bits"] == 1
    assert len(told["wrong"]) == 1
