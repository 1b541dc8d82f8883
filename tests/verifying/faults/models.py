"""Models with tied parameters, or with a skip and an auxiliary loss, for faults that recipes' models lack."""

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


class Routed(nn.Module):
    """Four blocks, the first of which feeds the last; each adds a number to an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(RoutedBlock() for _ in range(4))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids)
        auxiliary = x.new_zeros(())
        first = x
        for number, block in enumerate(self.blocks):
            x, more = block(x + first if number == 3 else x)
            auxiliary = auxiliary + more
            first = x if number == 0 else first
        return self.head(x), auxiliary


class RoutedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.inner = nn.Linear(16, 4), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        return x + self.inner(x).tanh() * shares[..., :1], shares.square().mean()


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


def loss_with_auxiliary(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total, weight = loss(output[0], batch)
    return total + weight * output[1], weight


def tied_subject() -> UserSubject:
    """Two steps of it."""
    return _subject(Tied, loss)


def routed_subject() -> UserSubject:
    """Two steps of the model with a skip and an auxiliary loss."""
    return _subject(Routed, loss_with_auxiliary)


def _subject(model: Any, loss: Any) -> UserSubject:
    return UserSubject(
        model_fn=model,
        batch_fn=make_batch,
        loss=loss,
        forward=call,
        optimizer=build_default_optimizer,
        **TWO_STEPS,
    )
