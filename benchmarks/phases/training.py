"""Ten trainings as people write them: torchrun training.py CASE."""

from __future__ import annotations

import contextlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

WIDTH, BATCH, STEPS, FIRST, RECORDED = 768, 96, 24, 10, 10


class Samples(Dataset):
    """Random samples, each of which takes so long to load."""

    def __init__(self, load_s: float = 0.0) -> None:
        self.load_s = load_s

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.load_s:
            time.sleep(self.load_s)
        return torch.full((WIDTH,), index / 1000.0)


def build(layers: int = 4) -> nn.Sequential:
    """Return a perceptron."""
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


class Training:
    """Plain DDP; the other cases change a part of it."""

    load_s = 0.0

    def __init__(self) -> None:
        self.model = self.wrap(build())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.loader = DataLoader(Samples(self.load_s), batch_size=BATCH)

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def step(self, batch: torch.Tensor, number: int) -> None:
        loss = self.model(batch).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Accumulation(Training):
    """Four microbatches per step, three of them without a reduction."""

    def step(self, batch: torch.Tensor, number: int) -> None:
        parts = batch.chunk(4)
        for place, part in enumerate(parts):
            last = place == len(parts) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                (self.model(part).square().mean() / len(parts)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Sharded(Training):
    """FSDP2."""

    def wrap(self, model: nn.Module) -> nn.Module:
        for part in model:
            if isinstance(part, nn.Linear):
                fully_shard(part)
        return fully_shard(model)


class SlowLoader(Training):
    """Samples that take half a millisecond each."""

    load_s = 0.0005


class Annotated(Training):
    """Parts of a step within record_function."""

    def step(self, batch: torch.Tensor, number: int) -> None:
        with record_function("train_step"):
            with record_function("forward"):
                loss = self.model(batch).square().mean()
            with record_function("backward"):
                loss.backward()
            with record_function("update"):
                self.optimizer.step()
                self.optimizer.zero_grad()


class TwoModels(Training):
    """A generator and a discriminator, with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = DistributedDataParallel(build(2))
        self.other = torch.optim.SGD(self.judge.parameters(), lr=1e-4)

    def step(self, batch: torch.Tensor, number: int) -> None:
        made = self.model(batch)
        (self.judge(batch).mean() - self.judge(made.detach()).mean()).backward()
        self.other.step()
        self.other.zero_grad()
        self.judge(made).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Scaled(Training):
    """Autocast to bfloat16, with a GradScaler."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step(self, batch: torch.Tensor, number: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(batch).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Evaluating(Training):
    """An evaluation after each second step."""

    def step(self, batch: torch.Tensor, number: int) -> None:
        super().step(batch, number)
        if number % 2:
            self.model.eval()
            with torch.no_grad():
                self.model.module(batch).square().mean().item()
            self.model.train()


class Compiled(Training):
    """torch.compile."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(torch.compile(model))


class ByHand(Training):
    """Gradients averaged by hand, and a metric in each step."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def step(self, batch: torch.Tensor, number: int) -> None:
        loss = self.model(batch).square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        metric = loss.detach().clone()
        dist.all_reduce(metric)
        metric.item()


CASES = {
    each.__name__: each
    for each in (
        Training,
        Accumulation,
        Sharded,
        SlowLoader,
        Annotated,
        TwoModels,
        Scaled,
        Evaluating,
        Compiled,
        ByHand,
    )
}


def main() -> None:
    """Train one case."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    training = CASES[sys.argv[1]]()
    for number, batch in enumerate(training.loader, 1):
        training.step(batch, number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
