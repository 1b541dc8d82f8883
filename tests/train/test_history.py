"""Nodes without a shared disk: a run never loses its history without a word."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.train.history import History
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool


def train(world, folders, num_steps, is_own_node):
    """Each rank with a folder of its own; gives the step that it went on from."""
    world.local_rank = 0 if is_own_node else world.rank
    trainer = Trainer(
        nn.Linear(2, 1),
        forward=lambda model, batch: model(batch[0]),
        loss=lambda output, batch: output.mean(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        microbatch_size=2,
    )
    first = trainer.resume(folders[world.rank])
    loader = trainer.loader(torch.utils.data.TensorDataset(torch.ones(16, 2)), global_batch_size=4)
    for batch in loader:
        if trainer.step(batch).number >= first + num_steps:
            break
        trainer.save()
    trainer.save()
    return first


def train_or_tell(world, folders, num_steps=2, is_own_node=True):
    try:
        return train(world, folders, num_steps, is_own_node)
    except PacelineError as error:
        return f"{error} {error.on_every_rank}"


@pytest.fixture
def disks(tmp_path: Path) -> list[str]:
    return [str(tmp_path / f"disk-{node}") for node in range(2)]


def test_the_survivor_does_not_start_anew(ranks: Pool, disks: list[str]) -> None:
    assert ranks.run(train_or_tell, nproc=2, args=(disks,)) == [0, 0]
    (told,) = ranks.run(train_or_tell, nproc=1, args=(disks[1:],))
    assert "there is no checkpoint; but " in told
    assert "recorded that step 2 was saved" in told
    assert "[PL318]" in told


def test_a_swap_of_nodes_is_refused_on_every_rank(ranks: Pool, disks: list[str]) -> None:
    assert ranks.run(train_or_tell, nproc=2, args=(disks,)) == [0, 0]
    told = ranks.run(train_or_tell, nproc=2, args=(disks[::-1],))
    for text in told:
        assert "(rank 1) the folder holds step 2" in text
        assert text.endswith("[PL318] True")


def test_the_same_nodes_go_on(ranks: Pool, disks: list[str]) -> None:
    assert ranks.run(train_or_tell, nproc=2, args=(disks,)) == [0, 0]
    assert ranks.run(train_or_tell, nproc=2, args=(disks, 1)) == [2, 2]


def test_a_shared_disk_is_not_noted(ranks: Pool, disks: list[str]) -> None:
    shared = [disks[0], disks[0]]
    assert ranks.run(train_or_tell, nproc=2, args=(shared,)) == [0, 0]
    assert not (Path(disks[0]) / ".committed-elsewhere").exists()
    assert ranks.run(train_or_tell, nproc=2, args=(shared, 1)) == [2, 2]


def test_two_histories_are_told(ranks: Pool, disks: list[str]) -> None:
    for disk in disks:
        assert ranks.run(train_or_tell, nproc=1, args=([disk],)) == [0]
    manifest = next(Path(disks[1]).glob("checkpoints/step-00000002/manifest.json"))
    manifest.write_bytes(manifest.read_bytes() + b"\n")  # as another run's would differ
    told = ranks.run(train_or_tell, nproc=2, args=(disks,))
    for text in told:
        assert "different checkpoints of step 2" in text
        assert text.endswith("[PL319] True")


def test_disks_that_are_not_shared_are_told_at_the_second_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world: Any = SimpleNamespace(is_main=False, local_rank=0, rank=1, world_size=2)
    history = History(world, tmp_path)
    history.note_commit(1)
    assert not caplog.messages
    history.note_commit(2)
    history.note_commit(3)
    assert len(caplog.messages) == 1
    assert "does not hold the checkpoints that rank 0 writes" in caplog.messages[0]
    assert (tmp_path / ".committed-elsewhere").read_text() == "3\n"
