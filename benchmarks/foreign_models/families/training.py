"""Trains a family in a plain loop of autograd, and with Paceline under a layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.foreign_models.families.table import FAMILIES, SAMPLES, Family
from paceline import Trainer

NUM_STEPS, MICROBATCH = 3, 2


def build(family: Family) -> nn.Module:
    """Return a model in fp64, complex numbers of twice 64 bits; the same in every process."""
    torch.manual_seed(0)
    model = family.build().double()
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_complex():
                tensor.data = tensor.data.to(torch.complex128)
    return model.train()


def make_batches(family: Family) -> list[dict[str, Tensor]]:
    """Return the global batches, one a step."""
    return [family.make_batch(torch.Generator().manual_seed(step)) for step in range(NUM_STEPS)]


def train_plainly(family: Family) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the trained weights and buffers of a loop that uses torch alone."""
    model = build(family)
    optimizer = family.optimizer(list(model.named_parameters()))
    losses = []
    for batch in make_batches(family):
        optimizer.zero_grad()
        total, weight = 0.0, 0
        for first in range(0, SAMPLES, MICROBATCH):
            part = {name: tensor[first : first + MICROBATCH] for name, tensor in batch.items()}
            loss, count = family.loss(family.forward(model, part), part)
            loss.backward()
            total, weight = total + loss.item(), weight + count
        trained = [p for p in model.parameters() if p.grad is not None]
        for p in trained:
            p.grad = p.grad / weight
        if family.clip_norm:
            torch.nn.utils.clip_grad_norm_(trained, family.clip_norm)
        optimizer.step()
        losses.append(total / weight)
    return losses, {**dict(model.named_parameters()), **dict(model.named_buffers())}


def train_laid_out(world: Any, name: str, layout: str) -> Any:
    """Return, on rank 0, the losses and whole tensors of a model that is trained under a layout."""
    family = FAMILIES[name]
    batches = make_batches(family)
    trainer = Trainer(
        build(family),
        forward=family.forward,
        loss=family.loss,
        optimizer=family.optimizer,
        layout=layout,
        example={key: tensor[:MICROBATCH] for key, tensor in batches[0].items()},
        dtype="fp64",
        reduction="fast",
        microbatch_size=MICROBATCH,
        clip_norm=family.clip_norm,
    )
    samples = [{key: t[at] for key, t in batch.items()} for batch in batches for at in range(SAMPLES)]
    loader = trainer.loader(samples, global_batch_size=SAMPLES, shuffle=False, epochs=1)
    losses = [float(trainer.step(batch).loss) for batch in loader]
    return losses, trainer.whole_state()
