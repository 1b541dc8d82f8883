"""A model whose parameters are tied, with a batch, for faults that no recipe's model can have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.verifying.check import build_default_optimizer
from paceline.verifying.subject import UserSubject
from tests.verifying.two_steps import TWO_STEPS


class Tied(nn.Module):
    """The table of the embedding is the weight of the head; some targets don't count."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        logits: Tensor = self.head(self.norm(x + self.inner(x)))
        return logits


def make_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    targets = torch.randint(0, 32, (8, 6), generator=generator)
    targets[torch.rand(8, 6, generator=generator) < 0.25] = -100
    return {"ids": torch.randint(0, 32, (8, 6), generator=generator), "y": targets}


def call(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(batch["ids"])


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["y"].flatten()
    return cross_entropy(output.flatten(0, 1), targets, reduction="sum"), (targets != -100).sum()


def tied_subject() -> UserSubject:
    """Two steps of it."""
    return UserSubject(
        model_fn=Tied,
        batch_fn=make_batch,
        loss=loss,
        forward=call,
        optimizer=build_default_optimizer,
        **TWO_STEPS,
    )
