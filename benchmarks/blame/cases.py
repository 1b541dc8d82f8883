"""Trainings with a planted cause of waiting, each on one rank, and healthy ones.

A case is a class: the loop of `Job` with one method changed. `phases` and `functions` are what the profile
may name.
"""

from __future__ import annotations

import functools
import gc
import io
import random
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

PAUSE_S = 0.06
WIDTH, DEPTH, BATCH = 128, 4, 16


class Numbers(Dataset[Tensor]):
    """Random vectors; one in each batch may take long."""

    def __init__(self, pause_s: float, *, burns: bool = False) -> None:
        self._pause_s = pause_s
        self._burns = burns

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        if index % BATCH == 0 and self._pause_s:
            if not self._burns:
                time.sleep(self._pause_s)
            until = time.thread_time() + self._pause_s * self._burns
            while time.thread_time() < until:
                sum(range(1000))
        return torch.full((WIDTH,), (index % 97) / 97)


class Block(nn.Module):
    """A layer that may take long."""

    def __init__(self, pause_s: float = 0.0, *, burns: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self._pause_s = pause_s
        self._burns = burns

    def forward(self, x: Tensor) -> Tensor:
        if self._pause_s and not self._burns:
            time.sleep(self._pause_s)
        until = time.thread_time() + self._pause_s * self._burns
        while time.thread_time() < until:
            torch.mm(self.layer.weight, self.layer.weight)
        return torch.tanh(self.layer(x))


class Job:
    """A healthy training with DDP.

    Args:
        rank: of the process.
        pause_s: how long the planted cause takes; 0 on other ranks, and where it is left out.
    """

    nproc = 2
    late = 1
    phases: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    module = ""
    needs_pause_alone = False

    def __init__(self, rank: int, pause_s: float) -> None:
        self.rank = rank
        self.pause_s = pause_s
        torch.manual_seed(0)
        self.data = self.batches()
        self.model = self.wrap(nn.Sequential(*self.blocks(), nn.Linear(WIDTH, 1)))
        self.optimizer = self.make_optimizer()

    def batches(self) -> Iterator[Tensor]:
        return iter(DataLoader(Numbers(0.0), batch_size=BATCH))

    def blocks(self) -> list[nn.Module]:
        return [Block() for _ in range(DEPTH)]

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def loss(self, output: Tensor) -> Tensor:
        return output.square().mean()

    def before_step(self) -> None: ...

    def after_step(self) -> None: ...

    def step(self) -> None:
        batch = next(self.data)
        loss = self.loss(self.model(batch))
        loss.backward()
        self.before_step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_step()


# ---- data


class SlowSample(Job):
    phases, functions = ("data",), ("__getitem__",)

    def batches(self) -> Iterator[Tensor]:
        return iter(DataLoader(Numbers(self.pause_s), batch_size=BATCH))


class BusySample(SlowSample):
    late = 0

    def batches(self) -> Iterator[Tensor]:
        return iter(DataLoader(Numbers(self.pause_s, burns=True), batch_size=BATCH))


class SlowCollate(Job):
    late, phases, functions = 0, ("data",), ("collate",)

    def collate(self, samples: list[Tensor]) -> Tensor:
        time.sleep(self.pause_s)
        return torch.stack(samples)

    def batches(self) -> Iterator[Tensor]:
        return iter(DataLoader(Numbers(0.0), batch_size=BATCH, collate_fn=self.collate))


class SlowWorker(Job):
    """The worker is another process: the loop's line that waits for it is what can be named."""

    phases, functions = ("data",), ("step",)

    def batches(self) -> Iterator[Tensor]:
        return iter(DataLoader(Numbers(self.pause_s), batch_size=BATCH, num_workers=1, prefetch_factor=1))


class SlowGenerator(Job):
    """A loader that torch does not know: it is Python code between the phases."""

    phases, functions = ("host",), ("batches",)

    def batches(self) -> Iterator[Tensor]:
        while True:
            time.sleep(self.pause_s)
            yield torch.ones(BATCH, WIDTH)


class SlowEverySecond(Job):
    """Late in every second step only."""

    phases, functions = ("data",), ("collate",)
    count = 0

    def collate(self, samples: list[Tensor]) -> Tensor:
        self.count += 1
        time.sleep(2 * self.pause_s * (self.count % 2))
        return torch.stack(samples)

    def batches(self) -> Iterator[Tensor]:
        return iter(DataLoader(Numbers(0.0), batch_size=BATCH, collate_fn=self.collate))


# ---- forward and loss


class SlowBlock(Job):
    late, phases, functions, module = 0, ("forward",), ("forward",), "2"

    def blocks(self) -> list[nn.Module]:
        return [Block(self.pause_s if number == 2 else 0.0) for number in range(DEPTH)]


class BusyBlock(SlowBlock):
    late, module = 1, "1"

    def blocks(self) -> list[nn.Module]:
        return [Block(self.pause_s if number == 1 else 0.0, burns=True) for number in range(DEPTH)]


class FourRanksBlock(SlowBlock):
    nproc, late = 4, 2


class SlowLoss(Job):
    phases, functions = ("forward",), ("loss",)

    def loss(self, output: Tensor) -> Tensor:
        time.sleep(self.pause_s)
        return output.square().mean()


class ManyValues(Job):
    """Reads values in the loop."""

    late, phases, functions = 0, ("forward",), ("loss",)

    def loss(self, output: Tensor) -> Tensor:
        until = time.thread_time() + self.pause_s
        while time.thread_time() < until:
            output.sum().item()
        return output.square().mean()


class LargeBatch(Job):
    """One rank has far more samples, so its forward and backward take longer."""

    phases, functions = ("forward", "backward"), ("forward", "step")

    def step(self) -> None:
        batch = next(self.data)
        loss = self.loss(self.model(batch.repeat(600 if self.pause_s else 1, 1)))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class SlowFirstMicrobatch(SlowBlock):
    """Accumulates over three microbatches, of which only the last one is reduced."""

    late, module = 1, "0"

    def blocks(self) -> list[nn.Module]:
        return [Block(self.pause_s / 3 if number == 0 else 0.0) for number in range(DEPTH)]

    def step(self) -> None:
        for number in range(3):
            with nullcontext() if number == 2 else self.model.no_sync():
                self.loss(self.model(next(self.data))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Sharded(SlowBlock):
    late, module = 1, "2"

    def wrap(self, model: nn.Module) -> nn.Module:
        for block in list(model)[:DEPTH]:
            fully_shard(block)
        fully_shard(model)
        return model


class Evaluating(Job):
    """One rank evaluates after each step."""

    late, phases, functions = 0, ("forward",), ("forward", "after_step")

    def blocks(self) -> list[nn.Module]:
        self.checked = Block(self.pause_s)
        return super().blocks()

    def after_step(self) -> None:
        if self.pause_s:
            with torch.no_grad():
                self.checked(torch.ones(1, WIDTH))


# ---- backward


class SlowGradient(torch.autograd.Function):
    """The identity, with a backward that takes long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause_s: float) -> Tensor:
        ctx.pause_s = pause_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.pause_s)
        return gradient, None


class SlowBackward(Job):
    phases, functions = ("backward",), ("backward",)

    def loss(self, output: Tensor) -> Tensor:
        return SlowGradient.apply(output, self.pause_s).square().mean()


class SlowHook(Job):
    """A hook on the first layer's gradient, which belongs to the last bucket."""

    late, phases, functions = 0, ("backward",), ("hook",)

    def blocks(self) -> list[nn.Module]:
        blocks = [Block() for _ in range(DEPTH)]
        if self.pause_s:
            blocks[0].layer.weight.register_hook(self.hook)
        return blocks

    def hook(self, gradient: Tensor) -> None:
        time.sleep(self.pause_s)

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, bucket_cap_mb=0.05)


class BusyHook(SlowHook):
    late = 1

    def hook(self, gradient: Tensor) -> None:
        until = time.thread_time() + self.pause_s
        while time.thread_time() < until:
            gradient.norm()


# ---- optimizer


class SlowClipping(Job):
    late, phases, functions = 0, ("optimizer",), ("before_step",)

    def before_step(self) -> None:
        time.sleep(self.pause_s)


class SlowSGD(torch.optim.SGD):
    """An optimizer whose step takes long."""

    pause_s = 0.0

    def step(self, closure: Any = None) -> None:
        time.sleep(self.pause_s)
        super().step(closure)


class SlowOptimizer(Job):
    phases, functions = ("optimizer",), ("step",)

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = SlowSGD(self.model.parameters(), lr=1e-4)
        optimizer.pause_s = self.pause_s
        return optimizer


# ---- Python code between the phases


class Logging(Job):
    late, phases, functions = 0, ("host",), ("after_step",)

    def after_step(self) -> None:
        time.sleep(self.pause_s)


class Printing(Logging):
    def after_step(self) -> None:
        stream = io.StringIO()
        until = time.thread_time() + self.pause_s
        while time.thread_time() < until:
            print(list(range(1000)), file=stream)
            stream.seek(0)


class Saving(Logging):
    functions = ("after_step", "write")

    def after_step(self) -> None:
        if self.pause_s:
            torch.save(self.model.state_dict(), SlowDisk(self.pause_s))


class SlowDisk(io.BytesIO):
    """A file whose first write takes long."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self._pause_s = pause_s

    def write(self, data: Any) -> int:
        pause_s, self._pause_s = self._pause_s, 0.0
        time.sleep(pause_s)
        return super().write(data)


class Collecting(Logging):
    late, phases, functions = 1, ("garbage collection",), ("after_step",)

    def after_step(self) -> None:
        until = time.thread_time() + self.pause_s
        while time.thread_time() < until:
            gc.collect()


class Metrics(Logging):
    """Computes a metric before all ranks average it."""

    late = 1

    def after_step(self) -> None:
        value = torch.ones(1)
        time.sleep(self.pause_s)
        dist.all_reduce(value)


class LateToBarrier(Logging):
    def after_step(self) -> None:
        time.sleep(self.pause_s)
        dist.barrier()


class LateRoot(Logging):
    """Rank 0 makes something, and sends it to all."""

    def after_step(self) -> None:
        time.sleep(self.pause_s)
        dist.broadcast(torch.ones(8), 0)


class Pickled:
    """An object that takes long to pickle."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def __reduce__(self) -> Any:
        time.sleep(self.pause_s)
        return Pickled, (0.0,)


class GatheringObjects(Logging):
    late, functions = 1, ("__reduce__",)

    def after_step(self) -> None:
        dist.all_gather_object([None] * 2, Pickled(self.pause_s))


class Subgroups(Logging):
    """Ranks reduce in pairs; one is late in its pair."""

    nproc, late = 4, 3

    @functools.cached_property
    def group(self) -> Any:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        return pairs[self.rank // 2]

    def make_optimizer(self) -> torch.optim.Optimizer:
        assert self.group is not None
        return super().make_optimizer()

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def before_step(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.group)

    def after_step(self) -> None:
        time.sleep(self.pause_s)


class Victim(Subgroups):
    """Rank 0 keeps rank 1 waiting in their pair, so both are late for the others. Rank 1 is a victim."""

    late, functions = 0, ("after_step",)

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def before_step(self) -> None: ...

    def after_step(self) -> None:
        time.sleep(self.pause_s)
        if self.rank < 2:
            dist.all_reduce(torch.ones(1), group=self.group)


class BusyThread(Job):
    """Another thread of the rank holds Python's lock half of the time, so everything there takes longer."""

    phases = ("data", "forward", "backward", "optimizer", "host")
    needs_pause_alone = True

    def step(self) -> None:
        thread = None
        if self.pause_s:
            thread = threading.Thread(target=self.burn)
            thread.start()
        for _ in range(60):
            torch.tanh(torch.ones(8))
        super().step()
        if thread is not None:
            thread.join()

    def burn(self) -> None:
        until = time.thread_time() + self.pause_s
        while time.thread_time() < until:
            sum(range(100))


CAUSES: dict[str, type[Job]] = {
    kind.__name__: kind
    for kind in (
        SlowSample,
        BusySample,
        SlowCollate,
        SlowWorker,
        SlowGenerator,
        SlowEverySecond,
        SlowBlock,
        BusyBlock,
        FourRanksBlock,
        SlowLoss,
        ManyValues,
        LargeBatch,
        SlowFirstMicrobatch,
        Sharded,
        Evaluating,
        SlowBackward,
        SlowHook,
        BusyHook,
        SlowClipping,
        SlowOptimizer,
        Logging,
        Printing,
        Saving,
        Collecting,
        Metrics,
        LateToBarrier,
        LateRoot,
        GatheringObjects,
        Subgroups,
        Victim,
        BusyThread,
    )
}


# ---- healthy


class ManyBuckets(Job):
    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, bucket_cap_mb=0.05)


class FourRanks(Job):
    nproc = 4


class Workers(Job):
    def batches(self) -> Iterator[Tensor]:
        return iter(DataLoader(Numbers(0.0), batch_size=BATCH, num_workers=1))


class EqualLoaders(Job):
    """All loaders are equally slow."""

    def batches(self) -> Iterator[Tensor]:
        return iter(DataLoader(Numbers(0.02), batch_size=BATCH))


class Jitter(Job):
    """All ranks vary by chance, none is always late."""

    def after_step(self) -> None:
        time.sleep(random.Random(f"{self.rank} {time.monotonic_ns()}").uniform(0.0, 0.02))


class TurnsOfLate(Job):
    """The ranks are late in turn."""

    count = 0

    def after_step(self) -> None:
        self.count += 1
        if self.count % 2 == self.rank:
            time.sleep(0.03)


class EqualEvaluation(Job):
    def after_step(self) -> None:
        with torch.no_grad():
            for _ in range(5):
                self.model.module(torch.ones(BATCH, WIDTH))


class PlainSums(Job):
    """Sums every gradient by a call of its own."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def before_step(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


class Ring(Job):
    """Passes a message around."""

    def after_step(self) -> None:
        world = dist.get_world_size()
        sending = dist.isend(torch.ones(1000), (self.rank + 1) % world)
        dist.recv(torch.empty(1000), (self.rank - 1) % world)
        sending.wait()


class ShardedHealthy(Sharded):
    late = 1


class Accumulating(SlowFirstMicrobatch):
    late = 1


HEALTHY: dict[str, type[Job]] = {
    kind.__name__: kind
    for kind in (
        Job,
        ManyBuckets,
        FourRanks,
        Workers,
        EqualLoaders,
        Jitter,
        TurnsOfLate,
        EqualEvaluation,
        PlainSums,
        Ring,
        ShardedHealthy,
        Accumulating,
    )
}
