"""Builds a recipe's task: forward, loss and metrics for each kind of data, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from paceline.data import TaskData
from paceline.models.moe import MoeOutput
from paceline.recipe.schema import AdamW, Muon, Recipe, Sgd
from paceline.train.kernels import rounds_by_place
from paceline.train.muon import StackedMuon
from paceline.train.schedule import build_schedule, scale_lr
from paceline.train.several import join_optimizers
from paceline.train.whole_metrics import Metric

# Target that does not count; the default of torch's cross_entropy.
IGNORED = -100


@dataclass(frozen=True)
class Task:
    """The functions of `Trainer` for one kind of data.

    Attributes:
        forward: (model, batch) to logits, or to an output with logits.
        loss: (logits, batch) to (sum of cross-entropies in nats, number of targets).
        metrics: other means to report when evaluating.
    """

    forward: Callable[[nn.Module, dict[str, Tensor]], Any]
    loss: Callable[[Any, dict[str, Tensor]], tuple[Tensor, Tensor]]
    metrics: dict[str, Metric]


def build_task(recipe: Recipe, data: TaskData) -> Task:
    """Return the task for a recipe's data."""
    if data.functions:
        forward = data.functions.get("forward", lambda model, batch: model(batch))
        return Task(forward, data.functions["loss"], data.functions.get("metrics", {}))
    if recipe.model.kind == "moe":
        metrics: dict[str, Metric] = {"fullest_expert": share_of_fullest}
        return Task(lambda model, batch: model(batch["ids"]), balanced_token_loss, metrics)
    if recipe.model.kind == "hf":
        return Task(lambda model, batch: model(input_ids=batch["ids"]).logits, token_loss, {})
    if recipe.data.kind in ("text", "masked_text"):
        return Task(lambda model, batch: model(batch["ids"]), token_loss, {})
    return Task(lambda model, batch: model(batch["images"]), class_loss, {"accuracy": class_accuracy})


def token_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropy over targets that count; logits [B, T, V], batch["targets"] [B, T]."""
    targets = batch["targets"]
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return losses, (targets != IGNORED).sum()


def balanced_token_loss(output: MoeOutput, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropy, and add the microbatch's auxiliary loss once per target.

    Divided by the number of targets, that is their mean cross-entropy plus the auxiliary loss.
    """
    total, num_targets = token_loss(output.logits, batch)
    return total + output.balance * num_targets, num_targets


def share_of_fullest(output: MoeOutput, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the share of the fullest expert in each microbatch, weighted by its number of tokens."""
    num_tokens = batch["ids"].numel()
    return output.fullest * num_tokens, torch.tensor(float(num_tokens))


def class_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropy over images; logits [B, C], batch["labels"] [B]."""
    labels = batch["labels"]
    return functional.cross_entropy(logits, labels, reduction="sum"), torch.tensor(float(len(labels)))


def class_accuracy(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the number of correctly classified images, and the number of images."""
    labels = batch["labels"]
    return (logits.argmax(-1) == labels).sum(), torch.tensor(float(len(labels)))


def build_optimizer(recipe: Recipe, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Build the recipe's optimizer; weight decay applies to parameters of at least two dimensions."""
    section, made = recipe.optimizer, list[torch.optim.Optimizer]()
    lr = scale_lr(section, section.lr, recipe.train.global_batch_size)
    trained = [p for _, p in named if p.requires_grad]
    if isinstance(section, Muon):
        # Inside of blocks; embeddings and heads are outside.
        hidden = [p for name, p in named if p.requires_grad and p.dim() >= 2 and "layers." in name]
        made.append(
            StackedMuon(
                hidden,
                lr=lr,
                weight_decay=section.weight_decay,
                momentum=section.momentum,
                nesterov=section.nesterov,
                ns_steps=section.ns_steps,
                adjust_lr_fn=section.adjust_lr,
            )
        )
        ids = {id(p) for p in hidden}
        trained = [p for p in trained if id(p) not in ids]
        lr = scale_lr(section, section.adamw_lr or section.lr, recipe.train.global_batch_size)
    is_exact = recipe.train.reduction == "exact"
    groups = [
        {"params": chosen, "weight_decay": section.weight_decay if decays else 0.0} | kernels
        for decays in (True, False)
        for chosen, kernels in _choose_kernels(
            [p for p in trained if (p.dim() >= 2) is decays], section, is_exact
        )
    ]
    if isinstance(section, Sgd):
        return torch.optim.SGD(groups, lr=lr, momentum=section.momentum, nesterov=section.nesterov)
    beta1, beta2 = section.betas
    made.append(torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=section.eps))
    joined: torch.optim.Optimizer = join_optimizers("model", made)
    return joined


def _choose_kernels(
    parameters: list[nn.Parameter], section: AdamW | Sgd | Muon, is_exact: bool
) -> list[tuple[list[nn.Parameter], dict[str, bool]]]:
    """Choose the fastest kernels; in exact mode, those that round an element alike wherever a tensor is cut.

    On CPU, one kernel for all tensors is 4x as fast as a loop.
    """
    is_sharded = any(isinstance(p, DTensor) for p in parameters)
    # On CPU a loop is faster than foreach. On DTensors, and on a GPU, its overhead exceeds its work.
    loops = not is_sharded and all(p.device.type == "cpu" for p in parameters)
    slower = {"foreach": not loops, "fused": False}
    if isinstance(section, Sgd):
        # torch's fused SGD does not accept DTensors, and rounds differently from the kernels that do.
        split = [(parameters, slower if is_sharded or is_exact else {"fused": True})]
    elif is_exact:
        split = [
            ([p for p in parameters if not rounds_by_place(p)], {"fused": True}),
            ([p for p in parameters if rounds_by_place(p)], slower),
        ]
    else:
        split = [(parameters, {"fused": True})]
    return [(chosen, kernels) for chosen, kernels in split if chosen]


def build_lr_schedule(
    recipe: Recipe, optimizer: torch.optim.Optimizer, num_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Build the recipe's schedule over a run of `num_steps`."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, build_schedule(recipe.optimizer, num_steps))
