"""What a recipe trains: forward, loss and metrics for each kind of data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from paceline.recipe.schema import AdamW, Recipe
from paceline.train.evaluation import Metric
from paceline.train.schedule import build_schedule, scale_lr

# Target that doesn't count; torch's own default for cross_entropy.
IGNORED = -100


@dataclass(frozen=True)
class Task:
    """Functions for `Trainer`.

    Attributes:
        forward: (model, batch) to logits.
        loss: (logits, batch) to (sum of cross-entropies in nats, number of targets).
        metrics: further means to report when evaluating.
    """

    forward: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    loss: Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, Tensor]]
    metrics: dict[str, Metric]


def build_task(recipe: Recipe) -> Task:
    """The task of a recipe's data."""
    if recipe.data.kind in ("text", "masked_text"):
        return Task(lambda model, batch: model(batch["ids"]), token_loss, {})
    return Task(lambda model, batch: model(batch["images"]), class_loss, {"accuracy": class_accuracy})


def token_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy over targets that count; logits [B, T, V], batch["targets"] [B, T]."""
    targets = batch["targets"]
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return losses, (targets != IGNORED).sum()


def class_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy over images; logits [B, C], batch["labels"] [B]."""
    labels = batch["labels"]
    return functional.cross_entropy(logits, labels, reduction="sum"), torch.tensor(float(len(labels)))


def class_accuracy(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Number of right classes, over images."""
    labels = batch["labels"]
    return (logits.argmax(-1) == labels).sum(), torch.tensor(float(len(labels)))


def build_optimizer(recipe: Recipe, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The recipe's optimizer; weight decay on parameters of two and more dimensions only."""
    section = recipe.optimizer
    lr = scale_lr(section, section.lr, recipe.train.global_batch_size)
    trained = [p for _, p in named if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if isinstance(section, AdamW):
        beta1, beta2 = section.betas
        kernels = _choose_kernels(trained, needs_same_bits=recipe.train.reduction == "exact")
        return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=section.eps, **kernels)
    # torch's fused SGD doesn't take DTensors; all of SGD's kernels give the same bits.
    kernels = _choose_kernels(trained, needs_same_bits=_are_sharded(trained))
    momentum, nesterov = section.momentum, section.nesterov
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, **kernels)


def _choose_kernels(trained: list[nn.Parameter], *, needs_same_bits: bool) -> dict[str, bool]:
    """The fastest kernels; or those that round an element alike wherever a tensor is cut.

    On CPU the fused ones are four times as fast as a loop, but they round the last elements of a tensor,
    those that fill no vector register, otherwise than the others.
    """
    if not needs_same_bits or any(p.device.type != "cpu" for p in trained):
        return {"fused": True}
    # A loop is faster on plain tensors; on DTensors each operation of it costs much more than its work.
    return {"foreach": _are_sharded(trained), "fused": False}


def _are_sharded(parameters: list[nn.Parameter]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def build_lr_schedule(
    recipe: Recipe, optimizer: torch.optim.Optimizer, num_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The recipe's schedule over a run of `num_steps`."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, build_schedule(recipe.optimizer, num_steps))
