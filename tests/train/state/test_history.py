"""A run that has saved never starts again from step 1, also where nodes share no disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.train.state import folder_view
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool


def train(world, folders, num_steps, is_own_node):
    """Each rank with a folder of its own; gives the step that it went on from."""
    world.local_rank = 0 if is_own_node else world.rank
    folder_view._APPEARS_S = 0.1
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
    trainer.close()
    return first


def train_or_tell(world, folders, num_steps=2, is_own_node=True):
    try:
        return train(world, folders, num_steps, is_own_node)
    except PacelineError as error:
        return f"{error} {error.on_every_rank}"


@pytest.fixture
def disks(tmp_path: Path) -> list[str]:
    return [str(tmp_path / f"disk-{node}") for node in range(2)]


def test_the_disk_of_rank_0_has_the_checkpoints(ranks: Pool, disks: list[str]) -> None:
    assert ranks.run(train_or_tell, nproc=2, args=(disks,)) == [0, 0]
    assert [list(Path(disk).glob("checkpoints/step-*")) == [] for disk in disks] == [False, True]
    assert ranks.run(train_or_tell, nproc=2, args=(disks, 1)) == [2, 2]
    assert ranks.run(train_or_tell, nproc=1, args=(disks[:1], 1)) == [3]


def test_another_node_does_not_start_anew(ranks: Pool, disks: list[str]) -> None:
    assert ranks.run(train_or_tell, nproc=2, args=(disks,)) == [0, 0]
    (told,) = ranks.run(train_or_tell, nproc=1, args=(disks[1:],))
    assert f"no checkpoint in {disks[1]}" in told
    assert "noted that step 2 was saved" in told
    assert "[PL550]" in told
    for text in ranks.run(train_or_tell, nproc=2, args=(disks[::-1],)):
        assert "has a checkpoint of step 2" in text
        assert text.endswith("[PL550] True")


def test_checkpoints_that_were_removed_are_missed(ranks: Pool, disks: list[str]) -> None:
    shared = [disks[0], disks[0]]
    assert ranks.run(train_or_tell, nproc=2, args=(shared,)) == [0, 0]
    assert ranks.run(train_or_tell, nproc=2, args=(shared, 1)) == [2, 2]
    shutil.rmtree(Path(disks[0]) / "checkpoints")
    told = ranks.run(train_or_tell, nproc=2, args=(shared,))
    for text in told:
        assert "noted that step 3 was saved" in text
        assert text.endswith("[PL550] True")


def train_and_lose(world, folder, launcher):
    """Ranks of one launcher save, lose the whole folder, and are started again."""
    attempt = f"{launcher}/attempt_0/{world.rank}"
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{attempt}/error.json"
    found = [train_or_tell(world, [folder] * 2, is_own_node=False)]
    world.barrier()
    if world.is_main:
        shutil.rmtree(folder)
    world.barrier()
    found.append(
        train_or_tell(world, [folder] * 2, is_own_node=False)
    )  # the same process starts over on purpose
    world.barrier()
    if world.is_main:
        shutil.rmtree(folder)
        for note in Path(launcher).glob("saved-*"):  # as another process of the launcher left it
            note.write_text(note.read_text().replace(str(os.getpid()), "1"))
    world.barrier()
    found.append(train_or_tell(world, [folder] * 2, is_own_node=False))
    return found


def test_a_restart_remembers_that_a_save_was_made(ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "launcher").mkdir()
    for found in ranks.run(train_and_lose, nproc=2, args=(str(tmp_path / "run"), str(tmp_path / "launcher"))):
        assert found[:2] == [0, 0]
        assert "has restarted its ranks, and they had saved step 2" in found[2]
        assert found[2].endswith("[PL550] True")
