"""Saves in the background: the numbers of one step, committed without the ranks, and never in the way."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.checkpoint import (
    files,
    hash_stored,
    hash_tensors,
    list_at,
    open_usable,
    verify,
)
from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.writing import joint
from paceline.checkpoint.writing.state_copy import CopyMemory, StateCopy
from paceline.errors import PacelineError
from paceline.train import belongings, metrics
from paceline.train.state.write import agree
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool, RankError

WIDTH, GLOBAL_BATCH = 24, 8


class Samples:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))}


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.BatchNorm1d(2 * WIDTH),
        nn.Linear(2 * WIDTH, WIDTH),
        nn.Linear(WIDTH, 3),
    )


def build_plain_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 3)
    )


class Counting:
    """A user's object whose tensor changes between steps."""

    def __init__(self) -> None:
        self.count = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count.copy_(state["count"])


def build_trainer(layout: str = "", mode: str = "sharded", **settings: Any) -> Trainer:
    return Trainer(
        build_plain_model if layout else build_model,
        forward=lambda model, batch: model(batch["x"]),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.05),
        layout=layout,
        microbatch_size=2,
        checkpoint_mode=mode,
        **{"asynchronous_saves": True} | settings,
    )


def steps(trainer: Trainer, num_steps: int) -> Iterator[int]:
    """Take steps and return the number of each."""
    loader = trainer._loaders.get("train") or trainer.loader(
        Samples(), global_batch_size=GLOBAL_BATCH, name="train"
    )
    last = trainer.step_number + num_steps
    while trainer.step_number < last:
        for share in loader:
            yield trainer.step(share).number
            if trainer.step_number == last:
                return


def describe(trainer: Trainer) -> str:
    """Return a hash of model and optimizer, whole; on rank 0."""
    found = {f"model.{name}": value for name, value in trainer.whole_state().items()}
    tree = trainer._updates["model"].optimizer_state()
    for name, each in tree["parameters"].items():
        found |= {f"{name}.{key}": v.clone() for key, v in each["state"].items() if isinstance(v, Tensor)}
    return hash_tensors(found) if trainer.world.is_main else ""


def describe_checkpoint(path: Path) -> str:
    loaded = open_usable(path)
    found = {f"model.{name}": value.read() for name, value in loaded.model.items()}
    for name, each in loaded.optimizer["model"]["parameters"].items():
        found |= {f"{name}.{key}": v.read() for key, v in each["state"].items() if hasattr(v, "read")}
    return hash_tensors(found)


@contextlib.contextmanager
def slow_disk(**asked: Any) -> Iterator[None]:
    """Let each file operation of this process take a while, or each write fail."""

    def hook(operation: str, path: Path, start: int, num_bytes: int) -> None:
        delay_s = asked.get("delay_s", 0.0)
        time.sleep(random.uniform(0, delay_s) if asked.get("random") else delay_s)
        if operation == "write" and asked.get("errno"):
            raise OSError(asked["errno"], os.strerror(asked["errno"]), str(path))

    with files.inject(hook):
        yield


# ---- the same bytes as a save that everybody waits for


def save_both(world: Any, folder: str, layout: str, mode: str) -> None:
    for name, asynchronous in (("now", False), ("behind", True)):
        trainer = build_trainer(layout, mode, asynchronous_saves=asynchronous)
        counting = Counting()
        trainer.track(counting=counting)
        trainer.resume(f"{folder}/{name}")
        for _ in steps(trainer, 3):
            counting.count += 1
            handle = trainer.save()
            counting.count += 1
        assert handle.wait() == Path(str(handle))
        trainer.close()


@pytest.mark.parametrize(
    ("nproc", "layout", "mode"),
    [
        (1, "", "full"),
        (2, "dp_replicate=2", "full"),
        (2, "dp_replicate=2", "sharded"),
        (2, "dp_shard=2", "sharded"),
        (2, "dp_shard=2", "full"),
    ],
)
def test_has_the_bytes_of_a_save_that_everybody_waits_for(
    ranks: Pool, tmp_path: Path, nproc: int, layout: str, mode: str
) -> None:
    ranks.run(save_both, nproc, (str(tmp_path), layout, mode))
    now, behind = list_at(tmp_path / "now"), list_at(tmp_path / "behind")
    assert [path.name for path in now] == [path.name for path in behind]
    for one, other in zip(now, behind, strict=True):
        assert verify(other) == []
        expected, found = read_manifest(one), read_manifest(other)
        assert found.files == expected.files
        assert found.step == expected.step
    left = [path.name for path in (tmp_path / "behind/checkpoints").iterdir()]
    assert not [name for name in left if name.startswith((".tmp", ".trash"))]


# ---- torn copies


def save_slowly(world: Any, folder: str, layout: str) -> list[tuple[str, str]]:
    """Copy so slowly that the next step would overtake the copy if it did not wait."""
    copy = StateCopy._copy

    def slow(self: StateCopy, target: Tensor, tensor: Tensor, *, non_blocking: bool = False) -> None:
        time.sleep(0.01)
        copy(self, target, tensor, non_blocking=non_blocking)

    found = []
    StateCopy._copy = slow  # type: ignore[method-assign]
    try:
        trainer = build_trainer(layout, keep=9)
        trainer.resume(folder)
        before = None
        for _ in steps(trainer, 4):
            if before is not None:
                handle, expected = before
                found.append((expected, str(handle.wait())))
            expected = describe(trainer)
            before = trainer.save(), expected
        trainer.close()
    finally:
        StateCopy._copy = copy  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("layout", ["", "dp_shard=2", "dp_shard=2 zero=1"])
def test_a_checkpoint_holds_one_step(ranks: Pool, tmp_path: Path, layout: str) -> None:
    found = ranks.run(save_slowly, 2 if layout else 1, (str(tmp_path), layout))[0]
    assert len(found) == 3
    for expected, path in found:
        assert describe_checkpoint(Path(path)) == expected


def write_without_waiting(world: Any, folder: str) -> list[str]:
    copy = StateCopy._copy
    told = []

    def slow(self: StateCopy, target: Tensor, tensor: Tensor, *, non_blocking: bool = False) -> None:
        time.sleep(0.02)
        copy(self, target, tensor, non_blocking=non_blocking)

    trainer = build_trainer()
    trainer.resume(folder)
    weights = list(trainer.model.parameters())
    for number in steps(trainer, 3):
        if number == 2:
            break
    StateCopy._copy = slow  # type: ignore[method-assign]
    try:
        for _ in range(2):
            handle = trainer.save()
            with torch.no_grad():
                for weight in weights:
                    weight += 1
            with contextlib.suppress(PacelineError):
                handle.wait()
            assert handle.outcome is not None
            told.append("" if handle.outcome.error is None else handle.outcome.error.code)
            next(steps(trainer, 1))
    finally:
        StateCopy._copy = copy  # type: ignore[method-assign]
    trainer.close()
    return told


def test_weights_changed_behind_the_trainers_back_fail_the_save_once(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(write_without_waiting, 1, (str(tmp_path),)) == [["PL543", ""]]


# ---- killed ranks


def save_and_die(world: Any, folder: str, is_copied: bool) -> None:
    trainer = build_trainer("dp_shard=2")
    trainer.resume(folder)
    for number in steps(trainer, 2):
        if number == 1:
            trainer.save(wait=True)
    if not is_copied and world.rank == 1:
        StateCopy._copy_late = lambda self: time.sleep(60)  # type: ignore[assignment, method-assign, return-value]
    with slow_disk(delay_s=0.5):
        trainer.save()
        background = trainer._saver.saving.background
        assert background is not None
        assert background._state_copy is not None
        if is_copied:
            background._state_copy.wait()
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def resume_and_save(world: Any, folder: str) -> int:
    trainer = build_trainer("dp_shard=2")
    trainer.loader(Samples(), global_batch_size=GLOBAL_BATCH, name="train")
    number = trainer.resume(folder)
    next(steps(trainer, 1))
    trainer.save(wait=True)
    trainer.close()
    return number


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_save_that_a_kill_interrupts_is_not_committed(ranks: Pool, tmp_path: Path, is_copied: bool) -> None:
    with pytest.raises(RankError):
        ranks.run(save_and_die, 2, (str(tmp_path), is_copied), timeout_s=60)
    assert [path.name for path in list_at(tmp_path)] == ["step-00000001"]
    assert ranks.run(resume_and_save, 2, (str(tmp_path),)) == [1, 1]
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == [".lock", "step-00000001", "step-00000002"]


def close_early(world: Any, folder: str) -> list[str]:
    """Ask two handles after their trainers were closed: of a save that ends meanwhile, and of a lost one."""
    trainer = build_trainer()
    trainer.resume(f"{folder}/whole")
    next(steps(trainer, 1))
    handle = trainer.save()
    trainer.close()
    found = [handle.wait().name]
    with slow_disk(errno=errno.EIO):
        trainer = build_trainer()
        trainer.resume(f"{folder}/lost")
        next(steps(trainer, 1))
        handle = trainer.save()
        trainer.close()
    with pytest.raises(PacelineError) as caught:
        handle.wait()
    handle.outcome = None  # as on a rank that does not commit
    with pytest.raises(PacelineError) as unknown:
        handle.wait()
    return [*found, caught.value.code, unknown.value.code]


def test_closing_a_trainer_waits_for_its_last_save(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(close_early, 1, (str(tmp_path),)) == [["step-00000001", "PL508", "PL548"]]


# ---- failing disks


def save_on_a_bad_disk(world: Any, folder: str, max_failed: int) -> dict[str, Any]:
    """Save every step; rank 1's disk is full in the steps 2 and 3."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    codes = []
    trainer = build_trainer("dp_replicate=2", max_failed_saves=max_failed)
    trainer.resume(folder)
    try:
        for number in steps(trainer, 6):
            is_full = number in (2, 3) and world.rank == 1
            with slow_disk(errno=errno.ENOSPC if is_full else 0):
                handle = trainer.save()
                trainer._saver.saving._receive(None)  # the disk decides before it changes
        handle.wait()
    except PacelineError as error:
        codes.append(str(error))
    logging.getLogger("paceline").removeHandler(handler)
    trainer.close()
    return {"errors": codes, "told": [line for line in told if "PL508" in line], "step": trainer.step_number}


def test_a_full_disk_does_not_end_the_run_at_once(ranks: Pool, tmp_path: Path) -> None:
    found, other = ranks.run(save_on_a_bad_disk, 2, (str(tmp_path / "run"), 3))
    assert found["errors"] == other["errors"] == []
    assert len(found["told"]) == 2, "of the steps 2 and 3"
    assert "The disk is full: step 2 needs" in found["told"][0]
    assert "Failed saves in a row: 2; checkpoint.max_failed = 3" in found["told"][1]
    steps_there = [path.name for path in list_at(tmp_path / "run")]
    assert steps_there == ["step-00000004", "step-00000005", "step-00000006"]


def test_too_many_failed_saves_in_a_row_end_the_run(ranks: Pool, tmp_path: Path) -> None:
    found, other = ranks.run(save_on_a_bad_disk, 2, (str(tmp_path / "run"), 2))
    assert found["errors"] == other["errors"]
    assert "The disk is full" in found["errors"][0]
    assert "failed save number 2 in a row" in found["errors"][0]
    assert (found["step"], other["step"]) == (4, 4)
    (path,) = list_at(tmp_path / "run")
    assert (path.name, verify(path)) == ("step-00000001", [])


# ---- what is refused


# ---- a disk that does not answer


def save_on_a_disk_that_stands_still(world: Any, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 (rank 0, if it alone writes) cannot end an fsync of step 2 before step 3 was saved."""
    joint._STILL_S = 1.0
    trainer = build_trainer(**settings, max_failed_saves=2)
    blocked = int(settings["mode"] == "sharded")
    is_reached, answers = threading.Event(), threading.Event()

    def hook(operation: str, path: Path, start: int, num_bytes: int) -> None:
        is_of_step_2 = path.suffix == ".safetensors" and "step-00000002" in path.parent.name
        if operation == "fsync" and is_of_step_2 and world.rank == blocked:
            is_reached.set()
            answers.wait()

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline.train.state.saving").addHandler(handler)
    trainer.resume(folder)
    handles = []
    with files.inject(hook):
        for number in steps(trainer, 5):
            begin_s = time.monotonic()
            handles.append(trainer.save())
            if number == 2 and world.rank == blocked:
                assert is_reached.wait(20)
            if number == 3:  # the save of step 2 was waited for, by now
                assert time.monotonic() - begin_s < 15
                answers.set()
                if world.rank == blocked:
                    thread = trainer._saver.saving._stuck._thread  # type: ignore[union-attr]
                    thread.join(20)
        trainer.save(wait=True)
    state = describe(trainer)
    trainer.close()
    logging.getLogger("paceline.train.state.saving").removeHandler(handler)
    joint._STILL_S = 60.0
    return {"failed": [each.failed for each in handles], "messages": messages, "state": state}


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "sharded", "layout": "dp_shard=2"},
        {"mode": "sharded", "layout": "dp_shard=2", "asynchronous_saves": False},
        {"mode": "full", "layout": "dp_shard=2", "asynchronous_saves": False},
        {"mode": "full", "layout": "dp_replicate=2"},
    ],
    ids=str,
)
def test_a_disk_that_stands_still_fails_its_saves_only(
    ranks: Pool, tmp_path: Path, settings: dict[str, Any]
) -> None:
    found, other = ranks.run(save_on_a_disk_that_stands_still, 2, (str(tmp_path), settings))
    assert found["failed"] == other["failed"] == [False, True, True, False, False]
    blocked = int(settings["mode"] == "sharded")
    file = r"\.tmp-step-00000002-.*\.safetensors'"
    for message in found["messages"]:
        assert re.search(rf"no progress for \d s, .* to fsync: .*{file}.* \(rank {blocked} on ", message)
        assert "Training continues" in message
    assert len(found["messages"]) == 2
    # The thread that was given up commits nothing, and what is committed has the bits of its own step.
    assert [path.name for path in list_at(tmp_path)] == [f"step-0000000{n}" for n in (1, 4, 5)]
    assert describe_checkpoint(tmp_path / "checkpoints/step-00000005") == found["state"]
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


def save_in_a_folder_that_does_not_answer(world: Any, folder: str, settings: dict[str, Any]) -> Any:
    """A stat of the run's folder hangs on rank 0 from step 2 to 4; then the folder is replaced by another."""
    joint._STILL_S, metrics.WAIT_S, metrics._FLUSH_S = 0.6, 0.1, 0.0
    trainer, answers, usual = build_trainer(**settings, max_failed_saves=2), threading.Event(), os.stat

    def stat(path: Any, **kwargs: Any) -> os.stat_result:
        if path == Path(folder):
            answers.wait()
        return usual(path, **kwargs)

    trainer.resume(folder)
    handles, longest_s, code = [], 0.0, ""
    for number in steps(trainer, 6):
        if number in (2, 5):
            belongings.os.stat = stat if number == 2 else usual  # type: ignore[attr-defined, assignment]
        if number == 5:
            answers.set()
            time.sleep(2.0)  # for the threads that were given up
            joint._STILL_S = 10.0  # a busy machine stands still for a moment too
        if number == 6:
            Path(folder).rename(f"{folder}-aside") if world.is_main else None
            Path(folder).mkdir() if world.is_main else None
        begin_s = time.monotonic()
        try:
            handles.append(trainer.save())
            handles[-1].wait() if number in (1, 5, 6) else None
        except PacelineError as error:
            code = error.code
        longest_s = max(longest_s, time.monotonic() - begin_s)
    with contextlib.suppress(PacelineError):
        trainer.close()
    joint._STILL_S, metrics.WAIT_S, metrics._FLUSH_S = 60.0, 5.0, 1.0
    return [each.failed for each in handles[:5]], longest_s < 15, code


@pytest.mark.parametrize(
    "settings", [{"mode": "full"}, {"mode": "sharded", "asynchronous_saves": False}], ids=str
)
def test_a_folder_that_does_not_answer_fails_its_saves_only(
    ranks: Pool, tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    for found in ranks.run(save_in_a_folder_that_does_not_answer, 2, (str(folder), settings)):
        assert found == ([False, True, True, True, False], True, "PL522")
    assert [path.name for path in list_at(tmp_path / "run-aside")] == ["step-00000001", "step-00000005"]
    assert list(folder.iterdir()) == []


def save_in_a_step(world: Any, folder: str) -> str:
    trainer: Trainer | None = None

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        if trainer is not None and trainer.step_number == 2:
            trainer.save()
        return output.square().sum(), len(output)

    trainer = Trainer(
        build_model,
        forward=lambda model, batch: model(batch["x"]),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05),
        microbatch_size=2,
    )
    trainer.resume(folder)
    try:
        for _ in steps(trainer, 3):
            pass
    except PacelineError as error:
        trainer.save(wait=True)
        return error.code
    return ""


def test_saving_inside_a_step_is_refused(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(save_in_a_step, 1, (str(tmp_path),)) == ["PL545"]


def save_without_memory(world: Any, folder: str) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)

    def reserve(self: CopyMemory, num_bytes: int, device: torch.device) -> None:
        if world.rank == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        original(self, num_bytes, device)

    original, CopyMemory.reserve = CopyMemory.reserve, reserve  # type: ignore[method-assign]
    try:
        trainer = build_trainer("dp_shard=2")
        trainer.resume(folder)
        for _ in steps(trainer, 2):
            assert trainer.save().outcome is not None
        trainer.close()
    finally:
        CopyMemory.reserve = original  # type: ignore[method-assign]
        logging.getLogger("paceline").removeHandler(handler)
    return [line for line in told if "PL546" in line]


def test_without_memory_training_waits_and_says_so(ranks: Pool, tmp_path: Path) -> None:
    told, _ = ranks.run(save_without_memory, 2, (str(tmp_path),))
    assert len(told) == 1
    assert "rank 1: there is no memory for" in told[0]
    assert [verify(path) for path in list_at(tmp_path)] == [[], []]


def find_who_reserves(world: Any, folder: str, layout: str, mode: str) -> list[str]:
    grown: list[str] = []

    def reserve(self: CopyMemory, num_bytes: int, device: torch.device) -> None:
        if num_bytes > self.num_bytes:
            grown.append(threading.current_thread().name)
        original(self, num_bytes, device)

    original, CopyMemory.reserve = CopyMemory.reserve, reserve  # type: ignore[method-assign]
    try:
        trainer = build_trainer(layout, mode)
        trainer.resume(folder)
        for _ in steps(trainer, 2):
            pass
        trainer.save(wait=True)
        trainer.close()
    finally:
        CopyMemory.reserve = original  # type: ignore[method-assign]
    return grown


@pytest.mark.parametrize("mode", ["sharded", "full"])
def test_the_first_save_finds_its_memory_ready(ranks: Pool, tmp_path: Path, mode: str) -> None:
    layout = "dp_shard=2" if mode == "sharded" else "dp_replicate=2"
    found = ranks.run(find_who_reserves, 2, (str(tmp_path), layout, mode))
    assert found == [["paceline-copy"], ["paceline-copy"] if mode == "sharded" else []]


# ---- over many saves


def save_every_step(world: Any, folder: str, num_steps: int) -> tuple[list[str], int]:
    copy, chance = StateCopy._copy, random.Random(world.rank)

    def slow(self: StateCopy, target: Tensor, tensor: Tensor, *, non_blocking: bool = False) -> None:
        time.sleep(chance.uniform(0, 0.004))
        copy(self, target, tensor, non_blocking=non_blocking)

    hashes = []
    StateCopy._copy = slow  # type: ignore[method-assign]
    try:
        with slow_disk(delay_s=0.004, random=True):
            trainer = build_trainer("dp_shard=2", keep=num_steps)
            trainer.resume(folder)
            for _ in steps(trainer, num_steps):
                hashes.append(describe(trainer))
                handle = trainer.save()
            handle.wait()
            background = trainer._saver.saving.background
            assert background is not None
            num_bytes = background._memory.num_bytes
            trainer.close()
    finally:
        StateCopy._copy = copy  # type: ignore[method-assign]
    return hashes, num_bytes


@pytest.mark.parametrize("num_steps", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_saving_every_step_with_random_delays(ranks: Pool, tmp_path: Path, num_steps: int) -> None:
    args = (str(tmp_path / "run"), num_steps)
    hashes, _ = ranks.run(save_every_step, 2, args, timeout_s=280)[0]
    found = list_at(tmp_path / "run")
    assert [path.name for path in found] == [f"step-{number:08d}" for number in range(1, num_steps + 1)]
    assert [describe_checkpoint(path) for path in found] == hashes
    assert hash_stored(open_usable(found[-1]).model) != hash_stored(open_usable(found[0]).model)


def test_rows_of_metrics_tell_what_saves_cost(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(save_both, 1, (str(tmp_path), "", "full"))
    rows = [json.loads(line) for line in (tmp_path / "behind/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["save_stall_s"] is None
    assert all(row["save_stall_s"] > 0 for row in rows[1:])
    assert rows[-1]["save_s"] is None or rows[-1]["save_s"] > 0


def test_ranks_that_have_other_tensors_to_save_are_named() -> None:
    agree([(None, "same"), (None, "same")])
    with pytest.raises(PacelineError, match=r"rank 2 has other tensors to save than rank 0.*\[PL525\]"):
        agree([(None, "same"), (None, "same"), (None, "other")])
