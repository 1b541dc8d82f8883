"""Two starts that fail at the same step after the same checkpoint: the third one uses the one before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.checkpoint import CheckpointFolder, verify
from paceline.checkpoint.content import full
from paceline.errors import PacelineError
from paceline.train.state.disks import Disks, SharedDisk
from paceline.train.state.failures import Failures, may_come_from_state
from paceline.train.stopping import Stopped
from tests.dist.pool import Pool
from tests.train.state.test_saving import build_trainer, steps

DISKS = Disks((SharedDisk((0,), "node0"),), 0)
ALONE: Any = SimpleNamespace(world_size=1, is_main=True, rank=0)


def save(checkpoints: CheckpointFolder, *numbers: int) -> None:
    for step in numbers:
        checkpoints.save(step, full.prepare({"weight": torch.ones(3)}, {}, {}, None), identity={})


def start(checkpoints: CheckpointFolder, *, fails_at: int | None, source: int | None = None) -> list[int]:
    """Run one start, which goes on from the newest checkpoint; return the checkpoints that it found."""
    failures = Failures(ALONE, DISKS, checkpoints)
    failures.settle()
    found = list(checkpoints.steps())
    failures.begin(found[-1] if source is None else source)
    failures.note(fails_at or 99, None if fails_at is None else ValueError("a bad batch"))
    return found


def test_the_third_start_uses_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=9)
    save(checkpoints, 10, 20, 30)
    assert start(checkpoints, fails_at=33) == [10, 20, 30]
    assert start(checkpoints, fails_at=33) == [10, 20, 30]
    assert caplog.text == ""
    assert start(checkpoints, fails_at=None) == [10, 20]
    assert "2 starts went on from the checkpoint of step 30 and failed at step 33" in caplog.text
    assert "now failed-step-00000030" in caplog.text
    assert "PL556" in caplog.text
    assert verify(checkpoints.path / "failed-step-00000030") == [], "kept for a look"
    assert start(checkpoints, fails_at=None) == [10, 20], "nothing has failed since"


def test_a_checkpoint_that_is_not_the_cause_is_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=9)
    save(checkpoints, 10, 20, 30)
    found = [start(checkpoints, fails_at=33) for _ in range(6)]
    assert found == [[10, 20, 30]] * 2 + [[10, 20]] + [[10, 20, 30]] * 3, "only one is tried in its place"
    assert "failed at step 33 again, from an older checkpoint. step-00000030 was not the cause" in caplog.text
    assert caplog.text.count("PL556") == 2


def test_what_puts_nothing_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=9)
    save(checkpoints, 10)
    assert [start(checkpoints, fails_at=12) for _ in range(4)] == [[10]] * 4, "the only one stays"
    save(checkpoints, 20)
    for step in (21, 23, 22, 24):
        assert start(checkpoints, fails_at=step) == [10, 20], "another step each time"
    for _ in range(4):
        assert start(checkpoints, fails_at=21, source=0) == [10, 20], "it began without a checkpoint"
    assert "put aside" not in caplog.text
    assert "PL556" not in caplog.text


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (ValueError("a bad batch"), True),
        (PacelineError("PL431", saw="", rule="", fix=""), True),
        (PacelineError("PL508", saw="", rule="", fix=""), False),
        (RuntimeError("[gloo/pair.cc:554] Connection closed by peer [127.0.0.1]:1"), False),
        (dist.DistBackendError("NCCL"), False),
        (RuntimeError("DataLoader worker (pid(s) 18598) exited unexpectedly"), False),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), False),
        (OSError(28, "No space left on device"), False),
        (MemoryError(), False),
        (KeyboardInterrupt(), False),
        (Stopped(15, 3, None), False),
    ],
)
def test_only_errors_of_the_training_count(error: BaseException, counts: bool) -> None:
    assert may_come_from_state(error) is counts
    if not counts:
        return
    later = RuntimeError("it failed")
    later.__cause__ = RuntimeError("Connection reset by peer")
    assert not may_come_from_state(later)


def fail_often(world: Any, folder: str) -> list[int]:
    """The step that each of five starts goes on from; the first three fail at step 5, rank 0 by rank 1."""
    found = []
    for number in range(5):
        try:
            with paceline.start(device="cpu") as inner:
                trainer = build_trainer("dp_shard=2", asynchronous_saves=False)
                found.append(trainer.resume(folder))
                for step in steps(trainer, 6 - found[-1]):
                    if step in (2, 3):
                        trainer.save(wait=True)
                    if step == 4 and number < 3:
                        raise ValueError if inner.rank == 1 else RuntimeError("Connection closed by peer")
        except (ValueError, RuntimeError):
            world.barrier()
    return found


def test_ranks_note_the_step_at_which_they_fail(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(fail_often, args=(str(tmp_path),), timeout_s=60) == [[0, 3, 3, 2, 3]] * 2
    assert not list((tmp_path / "checkpoints").glob(".failed-at-*"))
