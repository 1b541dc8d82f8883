"""Trainings with one setting that could be better, and the same with the setting as advised.

A case is a class: the loop of `Job` with some methods changed. `setting` is the one that the profile must
advise, and `value` the one that the case starts with. `Job.settings` then has the advised value.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
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
        Unbalanced,
        Saving,
        SavingSometimes,
        Collecting,
    )
}
