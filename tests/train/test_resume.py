"""Stopped in any way and resumed: the same bits on the same ranks, the same samples on any ranks."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.checkpoint import files as checkpoint_files
from paceline.checkpoint import find_checkpoint, hash_tensors
from paceline.errors import PacelineError
from paceline.train.stopping import Stopped
from paceline.train.trainer import Trainer
from tests.checkpoint.states import load_checkpoint
from tests.dist.pool import Pool, RankError
from tests.train.cases import apart, tensors_apart

NUM_SAMPLES, GLOBAL_BATCH, MICROBATCH, LAST = 30, 8, 3, 9
BATCHES_PER_EPOCH = 4  # 8, 8, 8 and 6


class Samples(Dataset[dict[str, Tensor]]):
    """Augmented by the global generator, and each knows its number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.randn(6)
        return {"x": x, "id": torch.tensor(index)}


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
    )


class Ema:
    """An average with a random decay, drawn in the loop, from all generators that a loop may use."""

    def __init__(self, model: nn.Module) -> None:
        self.average = [p.detach().clone() for p in model.parameters()]
        self.num_updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.num_updates += 1
        share = 0.2 * (random.random() + float(np.random.rand()) + float(torch.rand(())))
        for average, parameter in zip(self.average, model.parameters(), strict=True):
            average.lerp_(parameter, share)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_updates = state["num_updates"]
        for average, value in zip(self.average, state["average"], strict=True):
            average.copy_(value)


@dataclass
class Part:
    """The result of one start on one rank.

    Attributes:
        losses: of its steps.
        ids: (step, sample) of each sample that this rank computed on.
        steps: the steps already taken, and those taken at the end.
        stopped: the message, where it was asked to stop.
        told: warnings while resuming.
        tensors: of the model.
    """

    losses: list[float]
    ids: list[tuple[int, int]]
    steps: tuple[int, int]
    stopped: str | None
    told: list[str]
    tensors: dict[str, Tensor]


@contextlib.contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """Collect the warnings that are logged on this rank inside the context."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("paceline").removeHandler(handler)


class Run:
    """One start of the run, as a user's script would have it."""

    def __init__(self, world: Any, folder: str, dtype: str = "fp32", num_workers: int = 0) -> None:
        self.world = world
        self.ids: list[tuple[int, int]] = []
        self.before_step: Callable[[], None] = lambda: None
        self.inside_step: Callable[[], None] = lambda: None
        self.trainer = Trainer(
            build_model,
            forward=self.forward,
            loss=lambda output, batch: ((output - 1).square().sum(), len(output)),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.02),
            schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LAST),
            dtype=dtype,
            microbatch_size=MICROBATCH,
            clip_norm=1.0,
            seed=3,
        )
        self.ema = Ema(self.trainer.model)
        self.trainer.track(ema=self.ema)
        self.loader = self.trainer.loader(Samples(), global_batch_size=GLOBAL_BATCH, num_workers=num_workers)
        if num_workers:  # the pool's processes are daemons, which may not have children by themselves
            multiprocessing.current_process()._config["daemon"] = False
        with noted_warnings() as self.told:
            self.first = self.trainer.resume(folder)
        self.losses: list[float] = []
        self.stopped: Stopped | None = None

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.inside_step()
        self.ids += [(self.trainer.step_number, int(index)) for index in batch["id"]]
        return model(batch["x"])

    def train(self, *, save_at: tuple[int, ...] = (), last: int = LAST) -> Run:
        try:
            while self.trainer.step_number < last:
                for share in self.loader:
                    self.before_step()
                    step = self.trainer.step(share)
                    self.losses.append(step.loss)
                    self.ema.update(self.trainer.model)
                    if step.number in save_at or step.number == last:
                        self.trainer.save()
                    if step.number == last:
                        break
        except Stopped as stopped:
            self.stopped = stopped
        finally:
            self.loader.close()
            multiprocessing.current_process()._config["daemon"] = True
        return self

    def result(self) -> Part:
        return Part(
            losses=self.losses,
            ids=self.ids,
            steps=(self.first, self.trainer.step_number),
            stopped=str(self.stopped) if self.stopped else None,
            told=self.told,
            tensors={n: t.clone() for n, t in self.trainer.model.state_dict().items()},
        )


def run(world: Any, folder: str, options: dict[str, Any] | None = None) -> Part:
    options = dict(options or {})
    start = {name: options.pop(name) for name in ("dtype", "num_workers") if name in options}
    return Run(world, folder, **start).train(**options).result()


def stop_by(world: Any, folder: str, rank: int, signum: int, step: int, inside: bool) -> Part:
    """Rank `rank` gets a signal before or inside a step."""
    started = Run(world, folder)

    def send() -> None:
        if world.rank == rank and started.trainer.step_number == step:
            os.kill(os.getpid(), signum)
            started.before_step = started.inside_step = lambda: None

    if inside:
        started.inside_step = send
    else:
        started.before_step = send
    return started.train().result()


def whole_hash(folder: Path) -> str:
    """Return a hash of everything in the newest checkpoint: model, optimizer, average, generators."""
    loaded = load_checkpoint(find_checkpoint(folder))
    flat = {f"model.{name}": tensor for name, tensor in loaded.model.items()}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                add(f"{name}.{key}", item)
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                add(f"{name}.{number}", item)
        elif value is not None and not isinstance(value, str):
            flat[name] = torch.as_tensor(value)

    add("optimizer", loaded.optimizer)
    add("state", loaded.state)
    assert loaded.step == LAST
    return hash_tensors(flat)


def model_hash(folder: Path) -> str:
    """Return the hash that `paceline checkpoint hash` prints."""
    return hash_tensors(load_checkpoint(find_checkpoint(folder)).model)


@pytest.fixture(scope="module")
def whole(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Part], Path]:
    """The run that nobody stops, on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    return ranks.run(run, args=(str(folder),)), folder


def check_ids(starts: list[list[Part]]) -> None:
    """Each sample once per epoch, over all ranks and starts."""
    used = [entry for parts in starts for part in parts for entry in part.ids]
    for epoch in range(-(-LAST // BATCHES_PER_EPOCH)):
        steps = range(BATCHES_PER_EPOCH * epoch + 1, min(BATCHES_PER_EPOCH * (epoch + 1), LAST) + 1)
        counts = Counter(index for step, index in used if step in steps)
        assert max(counts.values()) == 1
        if len(steps) == BATCHES_PER_EPOCH:
            assert len(counts) == NUM_SAMPLES


# ---- the same bits


@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "inside a step"])
@pytest.mark.parametrize(
    ("rank", "signum"),
    [(0, signal.SIGINT), (1, signal.SIGTERM), (1, signal.SIGINT)],
    ids=["0-INT", "1-TERM", "1-INT"],
)
def test_a_signal_at_one_rank_stops_all_after_one_step(
    ranks: Pool, whole: Any, tmp_path: Path, rank: int, signum: int, inside: bool
) -> None:
    expected, whole_folder = whole
    first = ranks.run(stop_by, args=(str(tmp_path), rank, signum, 5, inside))
    # Noted before step 6 (or inside step 5, which had been agreed on), so all know after step 6.
    saved = tmp_path / "checkpoints" / "step-00000006"
    message = f"stopped by {signal.Signals(signum).name} after step 6; saved {saved}"
    assert [part.stopped for part in first] == [message] * 2
    rest = ranks.run(run, args=(str(tmp_path),))
    assert [part.steps for part in rest] == [(6, LAST)] * 2
    assert first[0].losses + rest[0].losses == expected[0].losses
    assert model_hash(tmp_path) == model_hash(whole_folder)
    assert whole_hash(tmp_path) == whole_hash(whole_folder)
    check_ids([first, rest])


@pytest.mark.parametrize(
    "cuts", [(4,), (3, 7), tuple(range(1, LAST))], ids=["epoch end", "twice", "every step"]
)
def test_the_step_limit(ranks: Pool, whole: Any, tmp_path: Path, cuts: tuple[int, ...]) -> None:
    expected, whole_folder = whole
    parts = [ranks.run(run, args=(str(tmp_path), {"last": last})) for last in (*cuts, LAST)]
    assert [loss for results in parts for loss in results[0].losses] == expected[0].losses
    assert whole_hash(tmp_path) == whole_hash(whole_folder)
    check_ids(parts)


def test_with_loader_workers(ranks: Pool, whole: Any, tmp_path: Path) -> None:
    """Workers have read ahead when the run stops."""
    _, whole_folder = whole
    for last in (3, LAST):
        ranks.run(run, args=(str(tmp_path), {"last": last, "num_workers": 1}))
    assert whole_hash(tmp_path) == whole_hash(whole_folder)


def test_a_stop_without_a_folder_saves_nothing(ranks: Pool) -> None:
    assert (
        ranks.run(stop_without_folder)
        == ["75: stopped by SIGTERM after step 2; nothing saved, there is no run folder"] * 2
    )


def stop_without_folder(world: Any) -> str:
    trainer = Trainer(
        nn.Linear(6, 1),
        forward=lambda model, batch: model(batch["x"]),
        loss=lambda output, batch: (output.sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    try:
        for share in trainer.loader(Samples(), global_batch_size=8):
            if trainer.step_number == 1 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            trainer.step(share)
    except Stopped as stopped:
        return f"{stopped.code}: {stopped}"
    return "went on"


# ---- another number of ranks


def test_another_number_of_ranks_goes_on_with_the_next_sample(ranks: Pool, tmp_path: Path) -> None:
    one = ranks.run(run, nproc=1, args=(str(tmp_path / "one"), {"dtype": "fp64"}))[0]
    parts = []
    for nproc, last in ((2, 2), (3, 5), (1, 7), (4, LAST)):
        options = {"dtype": "fp64", "last": last}
        parts.append(ranks.run(run, nproc=nproc, args=(str(tmp_path / "many"), options)))
    losses = [loss for results in parts for loss in results[0].losses]
    assert apart(one.losses, losses) <= 1e-12
    assert tensors_apart(one.tensors, parts[-1][0].tensors) <= 1e-10
    check_ids(parts)
    check_ids([[one]])


# ---- killed, damaged, full


def kill_at(world: Any, folder: str, step: int) -> None:
    started = Run(world, folder)

    def kill() -> None:
        if world.rank == 1 and started.trainer.step_number == step:
            os.kill(os.getpid(), signal.SIGKILL)

    started.before_step = kill
    started.train(save_at=(2, 5))


def test_killed_without_warning(ranks: Pool, whole: Any, tmp_path: Path) -> None:
    expected, whole_folder = whole
    with pytest.raises(RankError) as caught:
        ranks.run(kill_at, args=(str(tmp_path), 7))
    assert caught.value.exit_codes == {1: -signal.SIGKILL}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # as a kill inside of a write leaves it
    rest = ranks.run(run, args=(str(tmp_path),))
    assert rest[0].steps == (5, LAST)
    assert whole_hash(tmp_path) == whole_hash(whole_folder)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, LAST + 1))
    assert [row["loss"] for row in rows] == expected[0].losses
    assert [row["samples"] for row in rows] == [8, 16, 24, 30, 38, 46, 54, 60, 68]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(ranks: Pool, whole: Any, tmp_path: Path) -> None:
    _, whole_folder = whole
    ranks.run(run, args=(str(tmp_path), {"save_at": (2, 4), "last": 6}))
    damage(tmp_path / "checkpoints" / "step-00000006" / "part-00000.safetensors")
    (tmp_path / "checkpoints" / "step-00000004" / "state.json").unlink()
    rest = ranks.run(run, args=(str(tmp_path),))
    told = rest[0].told
    assert len(told) == 5
    assert "part-00000.safetensors was altered" in told[0]
    assert "step-00000006 is left out; trying the one before it" in told[1]
    assert "state.json is missing" in told[2]
    assert "resuming after step 2" in told[4]
    assert rest[1].told == [], "rank 0 tells it for all"
    assert [part.steps for part in rest] == [(2, LAST)] * 2
    assert whole_hash(tmp_path) == whole_hash(whole_folder)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, LAST + 1))


def test_with_no_valid_checkpoint_all_ranks_are_reported(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(run, args=(str(tmp_path), {"last": 2}))
    damage(tmp_path / "checkpoints" / "step-00000002" / "part-00000.safetensors")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RankError) as caught:
        ranks.run(run, args=(str(tmp_path),))
    for rank in (0, 1):
        error = caught.value.causes[rank]
        assert isinstance(error, PacelineError)
        assert error.code == "PL509"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def with_a_full_disk(world: Any, folder: str) -> tuple[list[str], Part]:
    """Saving fails twice; the loop carries on, as a user's may."""

    def full(operation: str, path: Path, start: int, num_bytes: int) -> None:
        if operation == "write" and path.name == "part-00000.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")

    started, told = Run(world, folder), []

    def save() -> None:
        if started.trainer.step_number in (2, 3):
            with checkpoint_files.inject(full), pytest.raises(PacelineError) as caught:
                started.trainer.save(wait=True)
            told.append(str(caught.value))

    started.before_step = save
    return told, started.train(save_at=(5,)).result()


def test_a_full_disk_leaves_the_run_able_to_go_on(ranks: Pool, whole: Any, tmp_path: Path) -> None:
    expected, whole_folder = whole
    results = ranks.run(with_a_full_disk, args=(str(tmp_path),))
    for told, part in results:
        assert len(told) == 2
        assert "The disk is full: step 2 needs" in told[0]
        assert "[PL508]" in told[0]
        assert part.losses == expected[0].losses
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*step*")) == [
        "step-00000005",
        "step-00000009",
    ]
    assert whole_hash(tmp_path) == whole_hash(whole_folder)


def test_the_same_step_is_saved_once(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(save_twice, args=(str(tmp_path),))
    assert first == second
    assert first[0] == first[1]
    assert first[2] == first[3], "not written anew"


def save_twice(world: Any, folder: str) -> list[Any]:
    started = Run(world, folder).train(last=1)
    paths, times = [], []
    for _ in range(2):
        paths.append(str(started.trainer.save()))
        times.append(Path(paths[-1]).stat().st_mtime_ns)
    return [*paths, *times]


def late(world: Any, folder: str) -> list[Any]:
    """Tracked objects and loaders that are made after `resume` get their state then."""
    trainer = Trainer(
        build_model,
        forward=lambda model, batch: model(batch["x"]),
        loss=lambda output, batch: ((output - 1).square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.02),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LAST),
        microbatch_size=MICROBATCH,
        clip_norm=1.0,
        seed=3,
    )
    trainer.resume(folder)
    # What nobody asks for stays in the next checkpoint, so that a later start finds it.
    kept = Path(trainer.save())
    ema = Ema(trainer.model)
    trainer.track(ema=ema)
    return [kept.name, ema.num_updates, sum(float(a.sum()) for a in ema.average)]


def test_what_is_made_after_resume_gets_its_state_then(ranks: Pool, tmp_path: Path) -> None:
    started = ranks.run(average_of, args=(str(tmp_path),))
    for _ in range(2):
        assert ranks.run(late, args=(str(tmp_path),)) == [["step-00000003", 3, total] for total in started]


def average_of(world: Any, folder: str) -> float:
    started = Run(world, folder).train(last=3)
    return sum(float(a.sum()) for a in started.ema.average)


def resume_elsewhere(world: Any, folders: list[str]) -> list[str]:
    """Continue with a trainer in an empty folder."""
    started = Run(world, folders[0]).train(last=2)
    paths = [str(started.trainer.save())]
    assert started.trainer.resume(folders[1]) == 2
    paths.append(str(started.trainer.save()))
    started.train(last=3)
    return paths


def test_another_folder_is_another_run(ranks: Pool, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("one", "two")]
    for paths in ranks.run(resume_elsewhere, args=(folders,)):
        assert paths == [f"{folder}/checkpoints/step-00000002" for folder in folders]
    rows = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "two")]
    assert [[json.loads(line)["step"] for line in lines] for lines in rows] == [[1, 2], [3]]
