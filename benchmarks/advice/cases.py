"""Trainings with one setting that could be better, and the same with the setting as advised.

A case is a class: the loop of `Job` with some methods changed. `setting` is the one that the profile must
advise, and `value` the one that the case starts with. `Job.settings` then has the advised value.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, DEPTH, BATCH = 256, 4, 32


class Numbers(Dataset[Tensor]):
    """Random vectors, read from something slow."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        if self._pause_s:
            time.sleep(self._pause_s)
        return torch.full((WIDTH,), (index % 97) / 97)


class Job:
    """A training with DDP.

    Args:
        rank: of the process.
        value: of the setting, as JSON has it.
    """

    setting = ""
    value: Any = None
    samples = 1
    """By how many times more samples a step has with the setting as advised."""

    def __init__(self, rank: int, value: Any) -> None:
        self.rank = rank
        self.value = value
        self.count = 0
        torch.manual_seed(0)
        self.data = self.batches()
        self.model = self.wrap(self.build())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-5)

    def batches(self) -> Iterator[Tensor]:
        return itertools.repeat(torch.ones(BATCH, WIDTH))

    def build(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def backward(self) -> None:
        self.model(next(self.data)).square().mean().backward()

    def before_step(self) -> None: ...

    def after_step(self) -> None: ...

    def step(self) -> None:
        self.count += 1
        self.backward()
        self.before_step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_step()


class Workers(Job):
    """Both ranks read their samples slowly, in the loop."""

    setting, value = "num_workers", 0

    def batches(self) -> Iterator[Tensor]:
        data = Numbers(self.pause_s / BATCH)
        return iter(DataLoader(data, batch_size=BATCH, num_workers=self.value, multiprocessing_context=None))

    @property
    def pause_s(self) -> float:
        return 0.04

    def backward(self) -> None:
        super().backward()
        time.sleep(0.02)


class WorkersOfOne(Workers):
    """One rank reads its samples slowly."""

    @property
    def pause_s(self) -> float:
        return 0.04 * self.rank


class Synchronized(Job):
    """Four microbatches, each of which is reduced."""

    setting, value = "no_sync", False

    def build(self) -> nn.Module:
        return nn.Sequential(*[nn.Linear(WIDTH * 4, WIDTH * 4) for _ in range(6)], nn.Linear(WIDTH * 4, 1))

    def batches(self) -> Iterator[Tensor]:
        return itertools.repeat(torch.ones(2, WIDTH * 4))

    def backward(self) -> None:
        for number in range(4):
            with self.model.no_sync() if self.value and number < 3 else nullcontext():
                super().backward()


class OftenReduced(Synchronized):
    """Few samples per reduction of a large model."""

    setting, value, samples = "accumulation", 1, 2

    def backward(self) -> None:
        for number in range(self.value):
            with self.model.no_sync() if number < self.value - 1 else nullcontext():
                Job.backward(self)


class OneByOne(Job):
    """Gradients are summed by hand, one after the other."""

    setting, value = "collectives per step", 40

    def build(self) -> nn.Module:
        return nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)])

    def batches(self) -> Iterator[Tensor]:
        return itertools.repeat(torch.ones(BATCH, 64))

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def before_step(self) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters()]
        if self.value == 1:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
            return
        for gradient in gradients:
            dist.all_reduce(gradient)


class Searching(Job):
    """DDP looks for unused parameters; there are none."""

    setting, value = "find_unused_parameters", True

    def build(self) -> nn.Module:
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)])

    def batches(self) -> Iterator[Tensor]:
        return itertools.repeat(torch.ones(1, 4))

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=self.value)


class Halved(nn.Sequential):
    """Layers of which the first is never used."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self[1:]:
            x = layer(x)
        return x


class Static(Searching):
    """DDP looks for unused parameters; they are always the same."""

    setting, value = "static_graph", False

    def build(self) -> nn.Module:
        return Halved(*super().build())

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=True, static_graph=self.value)


class Reading(nn.Module):
    """Takes 6 ms per part of the work, without a core: a full machine would gain nothing from equal work."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.006 * len(x) / BATCH)
        return x


class Unbalanced(Job):
    """One rank has ten of twelve parts of the work."""

    setting, value = "work per rank", "unequal"

    def backward(self) -> None:
        parts = 6 if self.value == "equal" else (2, 10)[self.rank]
        self.model(next(self.data).repeat(parts, 1)).square().mean().backward()

    def build(self) -> nn.Module:
        return nn.Sequential(Reading(), *super().build())


class Saving(Job):
    """Rank 0 writes in every step."""

    setting, value = "every", 1

    def after_step(self) -> None:
        if self.rank == 0 and self.count % self.value == 0:
            time.sleep(0.03)


class SavingSometimes(Job):
    """Rank 0 writes in every fifth step; the advice is to do so a tenth as often."""

    setting, value = "every", 5

    def after_step(self) -> None:
        every = self.value if isinstance(self.value, int) else 50
        if self.rank == 0 and self.count % every == 0:
            time.sleep(0.1)


class Metric(Job):
    """All ranks average a long metric in every step."""

    setting, value = "every", 1

    def __init__(self, rank: int, value: Any) -> None:
        super().__init__(rank, value)
        self.values = torch.ones(2_000_000)

    def after_step(self) -> None:
        if self.count % self.value == 0:
            dist.all_reduce(self.values)


class Barriers(Job):
    """A barrier after each step."""

    setting, value = "barrier", True

    def build(self) -> nn.Module:
        return nn.Linear(8, 1)

    def batches(self) -> Iterator[Tensor]:
        return itertools.repeat(torch.ones(BATCH, 8))

    def after_step(self) -> None:
        if self.value:
            dist.barrier()


class Collecting(Job):
    """One rank has many objects, and Python's collector looks through them in every step."""

    setting, value = "gc.disable", False

    def __init__(self, rank: int, value: Any) -> None:
        super().__init__(rank, value)
        self.objects = [[number] for number in range(400_000 * rank)]

    def step(self) -> None:
        gc.disable()
        super().step()

    def after_step(self) -> None:
        if self.rank == 1 and not self.value:
            gc.collect()


CASES: dict[str, type[Job]] = {
    kind.__name__: kind
    for kind in (
        Workers,
        WorkersOfOne,
        Synchronized,
        OftenReduced,
        OneByOne,
        Searching,
        Static,
        Unbalanced,
        Saving,
        SavingSometimes,
        Metric,
        Barriers,
        Collecting,
    )
}
