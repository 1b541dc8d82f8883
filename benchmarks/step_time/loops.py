"""The same training, written with Paceline, by hand with bare torch, and with its peers.

All of them train the same model on the same data with the same optimizer groups, clipping and schedule, and
each takes its samples from its own loader. Each is a generator: `next()` takes one optimizer step and gives
a loss of it (of the global batch, or of the last microbatch on this rank).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from paceline.data import TaskData
from paceline.models import build_model
from paceline.recipe import Recipe
from paceline.train.loop import Loop
from paceline.train.run import build_loader, build_trainer
from paceline.train.schedule import build_schedule
from paceline.train.tasks import build_optimizer
from paceline.world import World

_LOG_EVERY = 10
# What is fastest for these models and changes no result; Paceline's defaults, and not torch's. Everybody gets
# them: the comparison is not about settings. (torch 2.13 renamed broadcast_buffers.)
DDP_SETTINGS: dict[str, Any] = {"gradient_as_bucket_view": True, "forward_sync_buffers": False}


@dataclass(frozen=True)
class Job:
    """The training that all variants do.

    Attributes:
        recipe: model, data, batch, optimizer.
        data: what `build_data(recipe)` gave.
        world: the ranks.
        folder: for what Paceline writes.
    """

    recipe: Recipe
    data: TaskData
    world: World
    folder: Path

    @property
    def num_microbatches(self) -> int:
        """Per rank and step."""
        train = self.recipe.train
        return train.global_batch_size // train.microbatch_size // self.world.world_size

    @property
    def num_steps(self) -> int:
        assert self.recipe.train.steps is not None
        return self.recipe.train.steps

    def build_model(self) -> nn.Module:
        torch.manual_seed(self.recipe.train.seed)
        return build_model(self.recipe, self.data)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build fused AdamW, with weight decay on matrices only."""
        return build_optimizer(self.recipe, list(model.named_parameters()))

    def build_schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, build_schedule(self.recipe.optimizer, self.num_steps))

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's microbatches, epoch after epoch, as a plain DataLoader gives them."""
        sampler: DistributedSampler[Any] = DistributedSampler(self.data.train, shuffle=True, drop_last=True)
        loader = DataLoader(
            self.data.train, batch_size=self.recipe.train.microbatch_size, sampler=sampler, drop_last=True
        )
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from loader


def token_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over tokens, as a hand-written loop has it."""
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def paceline(job: Job) -> Iterator[Any]:
    """Train as `paceline train` does, with metrics.jsonl and TensorBoard written."""
    trainer = build_trainer(job.recipe, job.data, job.num_steps)
    loader = build_loader(job.recipe, trainer, job.data.train, train=True)
    trainer.resume(job.folder)
    while True:
        for share in loader:
            yield trainer.step(share).loss


def loop_explicit(job: Job) -> Iterator[Any]:
    """Train in a loop of its own around `paceline.Loop`, with `step.backward`."""
    return _loop(job, explicit=True)


def loop_plain(job: Job) -> Iterator[Any]:
    """The same with `loss.backward()`."""
    return _loop(job, explicit=False)


def _loop(job: Job, *, explicit: bool) -> Iterator[Any]:
    train = job.recipe.train
    model = job.build_model()
    optimizer = job.build_optimizer(model)
    schedule = job.build_schedule(optimizer)
    loop = Loop(model, optimizer, microbatch_size=train.microbatch_size, reduction=train.reduction)
    loader = loop.loader(DataLoader(job.data.train, batch_size=train.global_batch_size, shuffle=True))
    while True:
        for step in loader:
            for batch in step:
                loss = token_loss(model(batch["ids"]), batch)
                if explicit:
                    step.backward(loss)
                else:
                    loss.backward()
            step.clip_grad_norm_(train.clip_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield loss.detach()


def hand_written(job: Job) -> Iterator[Any]:
    """Train with bare torch and tuned DDP, as a good engineer would."""
    model = job.build_model()
    ddp = DistributedDataParallel(model, **DDP_SETTINGS)
    optimizer = job.build_optimizer(model)
    schedule = job.build_schedule(optimizer)
    batches = job.batches()
    last = job.num_microbatches - 1
    for step in itertools.count():
        for number in range(job.num_microbatches):
            batch = next(batches)
            with nullcontext() if number == last else ddp.no_sync():
                loss = token_loss(ddp(batch["ids"]), batch)
                (loss / job.num_microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.recipe.train.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % _LOG_EVERY == 0:
            loss.item()
        yield loss.detach()


def accelerate(job: Job) -> Iterator[Any]:
    """Train with Hugging Face Accelerate, by its guide to gradient accumulation."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    # Accelerate knows broadcast_buffers by its old name only.
    settings = {**DDP_SETTINGS, "broadcast_buffers": DDP_SETTINGS["forward_sync_buffers"]}
    del settings["forward_sync_buffers"]
    accelerator = Accelerator(
        cpu=job.world.device.type == "cpu",
        gradient_accumulation_steps=job.num_microbatches,
        kwargs_handlers=[DistributedDataParallelKwargs(**settings)],
    )
    assert accelerator.num_processes == job.world.world_size
    model = job.build_model()
    loader = DataLoader(
        job.data.train, batch_size=job.recipe.train.microbatch_size, shuffle=True, drop_last=True
    )
    optimizer = job.build_optimizer(model)
    schedule = job.build_schedule(optimizer)
    # The schedule is left to this loop: prepared, it would step once per rank.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    while True:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = token_loss(model(batch["ids"]), batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), job.recipe.train.clip_norm)
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad(set_to_none=True)
            if not accelerator.sync_gradients:
                continue
            if step % _LOG_EVERY == 0:
                loss.item()
            step += 1
            yield loss.detach()


def fabric(job: Job) -> Iterator[Any]:
    """Train with Lightning Fabric, by its guide to gradient accumulation."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    runner = Fabric(
        accelerator=job.world.device.type,
        devices=job.world.world_size,
        strategy=DDPStrategy(**DDP_SETTINGS),
    )
    runner.launch()
    assert runner.world_size == job.world.world_size
    model = job.build_model()
    optimizer = job.build_optimizer(model)
    schedule = job.build_schedule(optimizer)
    wrapped, optimizer = runner.setup(model, optimizer)
    loader = runner.setup_dataloaders(
        DataLoader(job.data.train, batch_size=job.recipe.train.microbatch_size, shuffle=True, drop_last=True)
    )
    last = job.num_microbatches - 1
    step = number = 0
    while True:
        for batch in loader:
            with runner.no_backward_sync(wrapped, enabled=number != last):
                loss = token_loss(wrapped(batch["ids"]), batch)
                runner.backward(loss / job.num_microbatches)
            if number != last:
                number += 1
                continue
            number = 0
            runner.clip_gradients(wrapped, optimizer, max_norm=job.recipe.train.clip_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            if step % _LOG_EVERY == 0:
                loss.item()
            step += 1
            yield loss.detach()


def deepspeed_zero0(job: Job) -> Iterator[Any]:
    """Train with DeepSpeed without sharding."""
    return _deepspeed(job, stage=0)


def deepspeed_zero1(job: Job) -> Iterator[Any]:
    """Train with DeepSpeed, with optimizer state sharded over the ranks (ZeRO-1)."""
    return _deepspeed(job, stage=1)


def _deepspeed(job: Job, stage: int) -> Iterator[Any]:
    os.environ["DS_ACCELERATOR"] = job.world.device.type
    import deepspeed

    model = job.build_model()
    optimizer = job.build_optimizer(model)
    config = {
        "train_batch_size": job.recipe.train.global_batch_size,
        "train_micro_batch_size_per_gpu": job.recipe.train.microbatch_size,
        "gradient_accumulation_steps": job.num_microbatches,
        "gradient_clipping": job.recipe.train.clip_norm,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=job.build_schedule, config=config
    )
    batches = job.batches()
    for step in itertools.count():
        for _ in range(job.num_microbatches):
            batch = next(batches)
            loss = token_loss(engine(batch["ids"]), batch)
            engine.backward(loss)
            engine.step()
        if step % _LOG_EVERY == 0:
            loss.item()
        yield loss.detach()


VARIANTS: dict[str, Callable[[Job], Iterator[Any]]] = {
    "paceline": paceline,
    "loop_explicit": loop_explicit,
    "loop_plain": loop_plain,
    "hand_written": hand_written,
    "accelerate": accelerate,
    "fabric": fabric,
    "deepspeed_zero0": deepspeed_zero0,
    "deepspeed_zero1": deepspeed_zero1,
}
