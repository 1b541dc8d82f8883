"""The same GPT trained as a pipeline of Paceline, one of torch.distributed.pipelining, and in one process.

All of them train with fused AdamW and clipping. The last two take the same global batches; Paceline's loader
has an order of its own. Each is a generator: the first `next()` builds everything, each further one takes an
optimizer step and gives its loss, where this rank knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.functional import cross_entropy

from paceline.data import TaskData
from paceline.models import build_model
from paceline.recipe import Recipe
from paceline.train.run import build_loader, build_trainer
from paceline.train.tasks import build_optimizer
from paceline.world import World

# torch's class of each schedule.
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


@dataclass(frozen=True)
class Job:
    """The training that all variants share.

    Attributes:
        recipe: model, data, batch, optimizer, and the layout of Paceline's variant.
        data: what `build_data(recipe)` gave.
        world: the ranks.
        schedule: its name.
        starts: the layer that each stage begins with.
    """

    recipe: Recipe
    data: TaskData
    world: World
    schedule: str
    starts: tuple[int, ...]

    @property
    def num_microbatches(self) -> int:
        """Of a step."""
        return self.recipe.train.global_batch_size // self.recipe.train.microbatch_size

    def build_model(self) -> Any:
        torch.manual_seed(self.recipe.train.seed)
        return build_model(self.recipe, self.data)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the same global batches on all ranks."""
        generator = torch.Generator().manual_seed(0)
        loader = torch.utils.data.DataLoader(
            self.data.train,
            batch_size=self.recipe.train.global_batch_size,
            shuffle=True,
            generator=generator,
            drop_last=True,
        )
        while True:
            yield from loader


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def paceline(job: Job) -> Iterator[Any]:
    """Train the whole model, cut by `layout.stages`."""
    assert job.recipe.train.steps is not None
    trainer = build_trainer(job.recipe, job.data, job.recipe.train.steps)
    loader = build_loader(job.recipe, trainer, job.data.train, train=True)
    yield None
    while True:
        for share in loader:
            yield trainer.step(share).loss


class HandStage(nn.Module):
    """Some consecutive layers of a GPT, as one writes a stage by hand."""

    def __init__(self, model: Any, first: int, end: int) -> None:
        super().__init__()
        self.rotary = model.rotary
        self.embed_tokens = model.embed_tokens if first == 0 else None
        self.layers = nn.ModuleList(list(model.layers)[first:end])
        is_last = end == len(model.layers)
        self.norm = model.norm if is_last else None
        self.lm_head = model.lm_head if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        cos, sin = self.rotary(x.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        if self.norm is None or self.lm_head is None:
            return x
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def torch_pipelining(job: Job) -> Iterator[Any]:
    """torch's own stages and schedule."""
    model, rank, num_ranks = job.build_model(), job.world.rank, job.world.world_size
    ends = (*job.starts[1:], len(model.layers))
    own = [rank, len(job.starts) - 1 - rank] if job.schedule == "zbv" else range(rank, len(ends), num_ranks)
    parts = {index: HandStage(model, job.starts[index], ends[index]) for index in own}
    stages = [PipelineStage(part, i, len(job.starts), torch.device("cpu")) for i, part in parts.items()]
    kind = SCHEDULES[job.schedule]
    is_single = job.schedule in ("gpipe", "1f1b")
    schedule = kind(stages[0] if is_single else stages, job.num_microbatches, loss_fn=token_loss)
    named = [(f"{i}.{name}", p) for i, part in parts.items() for name, p in part.named_parameters()]
    optimizer = build_optimizer(job.recipe, named)
    yield None
    for batch in job.batches():
        losses: list[Tensor] = []
        inputs = (batch["ids"],) if 0 in parts else ()
        rest = {"target": batch["targets"], "losses": losses} if len(ends) - 1 in parts else {}
        schedule.step(*inputs, **rest)
        squares = torch.stack([p.grad.square().sum() for _, p in named if p.grad is not None]).sum()
        dist.all_reduce(squares)
        scale = min(1.0, job.recipe.train.clip_norm / (squares.sqrt().item() + 1e-6))
        torch._foreach_mul_([p.grad for _, p in named if p.grad is not None], scale)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield torch.stack(losses).mean().item() if losses else None


def one_process(job: Job) -> Iterator[Any]:
    """Train the whole model on rank 0, with accumulation; the other ranks wait."""
    if job.world.rank:
        while True:
            yield None
    model = job.build_model()
    optimizer = build_optimizer(job.recipe, list(model.named_parameters()))
    yield None
    for batch in job.batches():
        total = 0.0
        size = job.recipe.train.microbatch_size
        for ids, targets in zip(batch["ids"].split(size), batch["targets"].split(size), strict=True):
            loss = token_loss(model(ids), targets) / job.num_microbatches
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.recipe.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield total


VARIANTS: dict[str, Callable[[Job], Iterator[Any]]] = {
    "paceline": paceline,
    "torch_pipelining": torch_pipelining,
    "one_process": one_process,
}
