"""A save by several ranks: committed once all shares are there, and else not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from paceline.checkpoint import CheckpointFolder
from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.tensors import plan_tensors
from paceline.checkpoint.writing.joint import JointSave, Order, Outcome
from paceline.errors import PacelineError


def write(
    run: Path, store: HashStore, rank: int, *, error: PacelineError | None = None, gives_up: bool = False
) -> Outcome:
    order = Order(5, "token", 3, {"generation": 1}, 100)
    folder = CheckpointFolder(run, keep=9, generation=1)
    save = JointSave(folder, order, rank, store, lambda error: error)
    plan = plan_tensors(f"part-{rank}.safetensors", {"x": torch.ones(rank + 1)})
    if gives_up:
        save.close_soon(0.0)
    save.start([plan], (), error)
    outcome = save.wait()
    assert outcome is not None
    return outcome


def write_all(run: Path, *errors: PacelineError | None) -> list[Outcome]:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda rank: write(run, store, rank, error=errors[rank]), range(3)))


def left(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_rank_0_commits_the_files_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.commit.check_fits", lambda tmp: [])  # files of a test
    first, *others = write_all(tmp_path, None, None, None)
    assert first.path == tmp_path / "checkpoints/step-00000005"
    assert [(other.path, other.error) for other in others] == [(None, None)] * 2
    assert list(read_manifest(first.path).files) == [f"part-{rank}.safetensors" for rank in range(3)]
    assert left(tmp_path) == [".lock", "step-00000005"]


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_without_its_share_ends_the_save(tmp_path: Path, rank: int) -> None:
    error = PacelineError("PL543", saw="torn.", rule="", fix="")
    found = write_all(tmp_path, *(error if each == rank else None for each in range(3)))
    assert found[0].error is not None
    assert found[0].error.code == "PL543"
    assert left(tmp_path) == [".lock"]


def test_a_rank_that_has_ended_is_not_awaited_for_ever(tmp_path: Path) -> None:
    store = HashStore()
    write(tmp_path, store, 1)
    outcome = write(tmp_path, store, 0, gives_up=True)
    assert outcome.error is not None
    assert outcome.error.code == "PL541"
    assert left(tmp_path) == [".lock"]
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_an_unexpected_error_ends_the_save(tmp_path: Path) -> None:
    class Broken(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    outcome = write(tmp_path, Broken(), 0)
    assert outcome.error is not None
    assert outcome.error.code == "PL544"
    assert "Connection reset" in outcome.error.saw
    assert left(tmp_path) == [".lock"]
