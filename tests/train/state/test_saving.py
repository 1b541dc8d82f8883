"""Saves in the background: the numbers of one step, committed without the ranks, and never in the way."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from paceline.checkpoint import (
    find_checkpoint,
    hash_stored,
    hash_tensors,
    is_usable,
    list_at,
    open_usable,
    verify,
)
from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.writing import writer_process
from paceline.checkpoint.writing.state_copy import StateCopy
from paceline.errors import PacelineError
from paceline.train.state import saving as saving_module
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool, RankError
from tests.train.state.slow_writer import ORDERS

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
def slow_writer(orders: Path, **asked: Any) -> Iterator[None]:
    """Let writers that are started inside do what `orders` says."""
    orders.write_text(json.dumps(asked))
    before, writer_process.PROGRAM = writer_process.PROGRAM, "tests.train.state.slow_writer"
    os.environ[ORDERS] = str(orders)
    try:
        yield
    finally:
        writer_process.PROGRAM = before
        del os.environ[ORDERS]


def find_writers(orders: Path) -> list[psutil.Process]:
    """Return the living writers that were started with these orders."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if writer_process.MARKER in process.cmdline() and process.environ().get(ORDERS) == str(orders):
                found.append(process)
    return found


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
        assert (found.step, found.content) == (expected.step, expected.content)
    left = [path.name for path in (tmp_path / "behind/checkpoints").iterdir()]
    assert not [name for name in left if name.startswith((".tmp", ".saving", ".trash"))]


# ---- torn copies


def save_slowly(world: Any, folder: str, layout: str) -> list[tuple[str, str]]:
    """Copy so slowly that the next step would overtake the copy if it did not wait."""
    copy = StateCopy._copy

    def slow(self: StateCopy, start: int, tensor: Tensor, *, non_blocking: bool = False) -> None:
        time.sleep(0.01)
        copy(self, start, tensor, non_blocking=non_blocking)

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

    def slow(self: StateCopy, start: int, tensor: Tensor, *, non_blocking: bool = False) -> None:
        time.sleep(0.02)
        copy(self, start, tensor, non_blocking=non_blocking)

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


# ---- without the ranks


def save_and_die(world: Any, folder: str, orders: str, is_copied: bool) -> None:
    with slow_writer(Path(orders), delay_s=0.1):
        trainer = build_trainer("dp_shard=2")
        trainer.resume(folder)
        for number in steps(trainer, 2):
            if number == 1:
                trainer.save(wait=True)
        expected = describe(trainer)
        if world.is_main:
            Path(orders).with_suffix(".hash").write_text(expected)
        if not is_copied and world.rank == 1:
            StateCopy._copy_late = lambda self: time.sleep(60)  # type: ignore[assignment, method-assign, return-value]
        trainer.save()
        background = trainer._saver.saving.background
        assert background is not None
        assert background._state_copy is not None
        if is_copied:
            background._state_copy.join()
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def wait_until_no_writers(orders: Path, limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while find_writers(orders):
        assert time.monotonic() < end_s, find_writers(orders)
        time.sleep(0.05)


def test_what_was_copied_is_committed_without_the_ranks(ranks: Pool, tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    with pytest.raises(RankError):
        ranks.run(save_and_die, 2, (str(tmp_path / "run"), str(orders), True), timeout_s=60)
    assert [path.name for path in list_at(tmp_path / "run")] == ["step-00000001"], "the disk is slow"
    wait_until_no_writers(orders)
    newest = find_checkpoint(tmp_path / "run")
    assert newest.name == "step-00000002"
    assert verify(newest) == []
    assert describe_checkpoint(newest) == orders.with_suffix(".hash").read_text()
    left = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert left == [".lock", "step-00000001", "step-00000002"]


def test_what_was_copied_in_part_is_not(ranks: Pool, tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    with pytest.raises(RankError):
        ranks.run(save_and_die, 2, (str(tmp_path / "run"), str(orders), False), timeout_s=60)
    wait_until_no_writers(orders)
    left = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert left == [".lock", "step-00000001"]


def resume_only(world: Any, folder: str) -> int:
    trainer = build_trainer("dp_shard=2")
    trainer.loader(Samples(), global_batch_size=GLOBAL_BATCH, name="train")
    number = trainer.resume(folder)
    trainer.close()
    return number


def test_a_new_start_waits_for_writers_of_the_one_before(ranks: Pool, tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    with pytest.raises(RankError):
        ranks.run(save_and_die, 2, (str(tmp_path / "run"), str(orders), True), timeout_s=60)
    assert len(find_writers(orders)) == 2
    assert ranks.run(resume_only, 2, (str(tmp_path / "run"),)) == [2, 2]
    wait_until_no_writers(orders, 5.0)


def close_early(world: Any, folder: str, orders: str) -> list[str]:
    """Ask two handles after their trainers were closed: of a save that ends meanwhile, and of a lost one."""
    trainer = build_trainer()
    trainer.resume(f"{folder}/whole")
    next(steps(trainer, 1))
    handle = trainer.save()
    trainer.close()
    found = [handle.wait().name]
    with slow_writer(Path(orders), errno=errno.EIO):
        trainer = build_trainer()
        trainer.resume(f"{folder}/lost")
        next(steps(trainer, 1))
        handle = trainer.save()
        trainer.close()
    with pytest.raises(PacelineError) as caught:
        handle.wait()
    return [*found, caught.value.code]


def test_closing_a_trainer_waits_for_its_last_save(ranks: Pool, tmp_path: Path) -> None:
    found = ranks.run(close_early, 1, (str(tmp_path), str(tmp_path / "orders")))
    assert found == [["step-00000001", "PL508"]]


# ---- failing disks and lost writers


def save_on_a_bad_disk(world: Any, folder: str, orders: str, max_failed: int) -> dict[str, Any]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    codes = []
    with slow_writer(Path(orders), errno=errno.ENOSPC):
        trainer = build_trainer("dp_replicate=2", max_failed_saves=max_failed)
        trainer.resume(folder)
        Path(orders).rename(f"{orders}-away{world.rank}") if world.is_main else None
        torch.distributed.barrier()
        try:
            for number in steps(trainer, 6):
                if world.is_main:
                    Path(f"{orders}-away0").rename(orders) if number == 2 else None
                    Path(orders).rename(f"{orders}-away0") if number == 4 else None
                torch.distributed.barrier()
                handle = trainer.save()
                trainer._saver.saving._receive(None)  # the disk decides before it changes
                torch.distributed.barrier()
            handle.wait()
        except PacelineError as error:
            codes.append(str(error))
    logging.getLogger("paceline").removeHandler(handler)
    trainer.close()
    return {"errors": codes, "told": [line for line in told if "PL508" in line], "step": trainer.step_number}


def test_a_full_disk_does_not_end_the_run_at_once(ranks: Pool, tmp_path: Path) -> None:
    found, other = ranks.run(save_on_a_bad_disk, 2, (str(tmp_path / "run"), str(tmp_path / "orders"), 3))
    assert found["errors"] == other["errors"] == []
    assert len(found["told"]) == 2, "of the steps 2 and 3"
    assert "The disk is full: step 2 needs" in found["told"][0]
    assert "Failed saves in a row: 2; checkpoint.max_failed = 3" in found["told"][1]
    steps_there = [path.name for path in list_at(tmp_path / "run")]
    assert steps_there == ["step-00000004", "step-00000005", "step-00000006"]


def test_too_many_failed_saves_in_a_row_end_the_run(ranks: Pool, tmp_path: Path) -> None:
    found, other = ranks.run(save_on_a_bad_disk, 2, (str(tmp_path / "run"), str(tmp_path / "orders"), 2))
    assert found["errors"] == other["errors"]
    assert "The disk is full" in found["errors"][0]
    assert "failed save number 2 in a row" in found["errors"][0]
    assert (found["step"], other["step"]) == (4, 4)
    (path,) = list_at(tmp_path / "run")
    assert (path.name, verify(path)) == ("step-00000001", [])


def lose_writers(world: Any, folder: str) -> list[str]:
    trainer = build_trainer("dp_shard=2")
    trainer.resume(folder)
    codes = []
    for number in steps(trainer, 3):
        background = trainer._saver.saving.background
        assert background is not None
        handle = trainer.save()
        if number == 2 and world.rank == 1:
            assert background._writer is not None
            os.kill(background._writer.pid, signal.SIGKILL)
        with contextlib.suppress(PacelineError):
            handle.wait()
        assert handle.outcome is not None
        codes.append("saved" if handle.outcome.error is None else handle.outcome.error.code)
    trainer.close()
    return codes


def test_a_killed_writer_costs_one_save(ranks: Pool, tmp_path: Path) -> None:
    # The kill may come too late for that save.
    (codes, other) = ranks.run(lose_writers, 2, (str(tmp_path),))
    assert codes == other
    assert (codes[0], codes[2]) == ("saved", "saved")
    assert codes[1] in ("PL540", "saved")
    assert all(is_usable(verify(path)) for path in list_at(tmp_path))
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert not [name for name in left if name.startswith((".tmp", ".saving"))]


def stop_writers(world: Any, folder: str, is_asked: bool) -> tuple[list[str], float]:
    """Stop a writer of rank 1 before its second save; return how saves ended, and how long the third took."""
    trainer = build_trainer("dp_shard=2")
    trainer.resume(folder)
    codes, waited_s = [], 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_process, "_LAST_S", 1.0)
        patch.setattr(saving_module, "STILL_S", 600.0 if is_asked else 4.0)
        patch.setattr(saving_module, "_STOPPING_STILL_S", 4.0)
        handles = []
        for number in steps(trainer, 3):
            background = trainer._saver.saving.background
            assert background is not None
            if number == 2:
                handles[0].wait()
                if world.rank == 1:
                    assert background._writer is not None
                    os.kill(background._writer.pid, signal.SIGSTOP)
            if number == 3 and is_asked:
                trainer._requests.signum = signal.SIGTERM
            begin_s = time.monotonic()
            handles.append(trainer.save())
            waited_s = time.monotonic() - begin_s
        handles[2].wait()
        trainer._requests.signum = 0
        for handle in handles:
            assert handle.outcome is not None
            codes.append("saved" if handle.outcome.error is None else handle.outcome.error.saw)
        trainer.close()
    return codes, waited_s


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_writer_that_stands_still_costs_one_save(ranks: Pool, tmp_path: Path, is_asked: bool) -> None:
    (codes, waited_s), other = ranks.run(stop_writers, 2, (str(tmp_path), is_asked))
    assert codes == other[0]
    assert (codes[0], codes[2]) == ("saved", "saved")
    assert "The writer of this rank" in codes[1]
    assert "made no progress" in codes[1]
    assert waited_s < 60
    assert [path.name for path in list_at(tmp_path)] == ["step-00000001", "step-00000003"]


# ---- what is refused


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


def save_without_memfd(world: Any, folder: str) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    create = os.memfd_create
    if world.rank == 1:
        del os.memfd_create
    try:
        trainer = build_trainer("dp_shard=2")
        trainer.resume(folder)
        for _ in steps(trainer, 2):
            assert trainer.save().outcome is not None
        trainer.close()
    finally:
        os.memfd_create = create
        logging.getLogger("paceline").removeHandler(handler)
    return [line for line in told if "PL546" in line]


def test_without_memory_to_share_training_waits_and_says_so(ranks: Pool, tmp_path: Path) -> None:
    told, _ = ranks.run(save_without_memfd, 2, (str(tmp_path),))
    assert len(told) == 1
    assert "rank 1: this system has no memfd_create" in told[0]
    assert [verify(path) for path in list_at(tmp_path)] == [[], []]


def test_the_writer_works_without_torch() -> None:
    heavy = "{'torch', 'numpy', 'safetensors'}"
    code = f"import paceline.checkpoint.writing.writer, sys; print({heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


# ---- over many saves


def save_every_step(world: Any, folder: str, orders: str, num_steps: int) -> tuple[list[str], int]:
    copy, chance = StateCopy._copy, random.Random(world.rank)

    def slow(self: StateCopy, start: int, tensor: Tensor, *, non_blocking: bool = False) -> None:
        time.sleep(chance.uniform(0, 0.004))
        copy(self, start, tensor, non_blocking=non_blocking)

    hashes = []
    StateCopy._copy = slow  # type: ignore[method-assign]
    try:
        with slow_writer(Path(orders), delay_s=0.004, random=True):
            trainer = build_trainer("dp_shard=2", keep=num_steps)
            trainer.resume(folder)
            for _ in steps(trainer, num_steps):
                hashes.append(describe(trainer))
                handle = trainer.save()
            handle.wait()
            background = trainer._saver.saving.background
            assert background is not None
            num_bytes = background.memory_bytes
            trainer.close()
    finally:
        StateCopy._copy = copy  # type: ignore[method-assign]
    return hashes, num_bytes


@pytest.mark.parametrize(
    "num_steps", [12, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_saving_every_step_with_random_delays(ranks: Pool, tmp_path: Path, num_steps: int) -> None:
    args = (str(tmp_path / "run"), str(tmp_path / "orders"), num_steps)
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
