"""Eleven training loops that differ in form, each with a clock of its own; some with what a profile advises.

A script is a class with the loop's body in `step`. It calls `at(phase)` where a phase ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

At = Callable[[str], None]
DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"


class Samples(Dataset[Tensor]):
    """Vectors, or images; reading one takes some time."""

    def __init__(self, shape: tuple[int, ...], pause_s: float) -> None:
        self._shape, self._pause_s = shape, pause_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self._pause_s)
        return torch.full(self._shape, (index % 97) / 97)


class Plain:
    """DDP over layers, with batches of a loader in the loop."""

    width, shape, batch, pause_s, workers = 512, (512,), 32, 0.0002, 0

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.rank = rank
        samples = Samples(self.shape, self.pause_s)
        self.batches = iter(DataLoader(samples, batch_size=self.batch, num_workers=self.workers))
        self.model: Any = self.wrap(self.build())
        self.optimizer = self.make_optimizer()

    def build(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(6)),
            nn.Linear(self.width, 1),
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=1e-5)

    def step(self, at: At) -> None:
        batch = next(self.batches)
        at(DATA)
        loss = self.model(batch).square().mean()
        at(FORWARD)
        loss.backward()
        at(BACKWARD)
        self.optimizer.step()
        at(OPTIMIZER)
        self.optimizer.zero_grad()


class LoadingInTheLoop(Plain):
    """A disk that takes 2 ms for a sample."""

    pause_s, batch = 0.002, 16


class Workers(Plain):
    """A loader whose two workers are slower than the step."""

    pause_s, workers = 0.003, 2


class Accumulating(Plain):
    """Three microbatches, of which each is reduced."""

    skips = False

    def step(self, at: At) -> None:
        for number in range(3):
            batch = next(self.batches)
            at(DATA)
            with self.model.no_sync() if self.skips and number < 2 else nullcontext():
                loss = self.model(batch).square().mean()
                at(FORWARD)
                loss.backward()
                at(BACKWARD)
        self.optimizer.step()
        at(OPTIMIZER)
        self.optimizer.zero_grad()


class Searching(Plain):
    """A search for unused parameters, of which there are none, over many small layers."""

    width, shape = 64, (64,)
    searches = True

    def build(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(150)))

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=self.searches)


class Sharded(Plain):
    def wrap(self, model: nn.Module) -> nn.Module:
        for layer in model.children():
            fully_shard(layer)
        return fully_shard(model)


class Images(Plain):
    """Convolutions, with annotations of the script's own that name other phases."""

    shape, batch = (3, 32, 32), 16

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(1)
        )

    def step(self, at: At) -> None:
        with record_function("backward"):
            batch = next(self.batches)
            at(DATA)
            with record_function("optimizer"):
                loss = self.model(batch).square().mean()
                at(FORWARD)
        loss.backward()
        at(BACKWARD)
        self.optimizer.step()
        at(OPTIMIZER)
        self.optimizer.zero_grad()


class Attention(Plain):
    """A transformer's layers with clipping and AdamW."""

    shape, batch, width = (64, 128), 4, 128

    def build(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(self.width, 4, 4 * self.width, batch_first=True, dropout=0.0)
        return nn.TransformerEncoder(layer, 3)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def step(self, at: At) -> None:
        batch = next(self.batches)
        at(DATA)
        loss = self.model(batch).square().mean()
        at(FORWARD)
        loss.backward()
        at(BACKWARD)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        at(OPTIMIZER)
        self.optimizer.zero_grad()


class TwoModels(Plain):
    """Two models with an optimizer each, as a GAN has; a step ends with the first one's."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.other = self.wrap(self.build())
        self.second = torch.optim.SGD(self.other.parameters(), lr=1e-5)

    def step(self, at: At) -> None:
        batch = next(self.batches)
        at(DATA)
        for model, optimizer in ((self.model, self.optimizer), (self.other, self.second)):
            loss = model(batch).square().mean()
            at(FORWARD)
            loss.backward()
            at(BACKWARD)
            optimizer.step()
            at(OPTIMIZER)
            optimizer.zero_grad()
            at("")


class SumsByHand(Plain):
    """No DDP: the loop reduces each gradient after the backward."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def step(self, at: At) -> None:
        batch = next(self.batches)
        at(DATA)
        loss = self.model(batch).square().mean()
        at(FORWARD)
        loss.backward()
        at(BACKWARD)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        at(OPTIMIZER)
        self.optimizer.zero_grad()


class Evaluating(Plain):
    """Each step evaluates on another batch."""

    def step(self, at: At) -> None:
        super().step(at)
        batch = next(self.batches)
        at(DATA)
        with torch.no_grad():
            self.model.module(batch)
        at(FORWARD)


SCRIPTS: dict[str, type[Plain]] = {
    kind.__name__: kind
    for kind in (
        Plain,
        LoadingInTheLoop,
        Workers,
        Accumulating,
        Searching,
        Sharded,
        Images,
        Attention,
        TwoModels,
        SumsByHand,
        Evaluating,
    )
}

# What a finding advises, as settings of the script, and how many of its samples a step then has.
ADVICE: dict[tuple[str, str], tuple[dict[str, Any], float]] = {
    ("LoadingInTheLoop", "PL917"): ({}, 1.0),  # num_workers as advised
    ("Accumulating", "PL918"): ({"skips": True}, 1.0),
    ("Searching", "PL920"): ({"searches": False}, 1.0),
    ("SumsByHand", "PL910"): ({"batch": 128}, 4.0),
}


def advised(kind: type[Plain], settings: dict[str, Any]) -> type[Plain]:
    """Return a script with other settings."""
    return type(f"{kind.__name__}Advised", (kind,), settings)


def iterate_marks(script: Plain) -> Iterator[dict[str, float]]:
    """Take steps, and yield the seconds of each phase by the script's own clock."""
    while True:
        yield _time_step(script)


def _time_step(script: Plain) -> dict[str, float]:
    times: dict[str, float] = {}
    last = began = time.perf_counter()

    def at(phase: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times[phase] = times.get(phase, 0.0) + now - last
        last = now

    script.step(at)
    total = time.perf_counter() - began
    times.pop("", None)
    return {**times, "host": total - sum(times.values())}
