"""A file of a user's: the model and the loss of a loop, and functions that describe them for `verify`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 32), nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.down(self.dropout(self.up(self.table(ids)).relu()))
        return result


def make_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(32, (16, 9), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(16, 8, generator=generator) < 0.3] = -100
    return {"ids": ids[:, :-1], "labels": labels}


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def check() -> dict[str, Any]:
    return {
        "model_fn": Net,
        "batch_fn": make_batch,
        "forward": mean_loss,
        "weight": lambda batch: (batch["labels"] != -100).sum(),
        "microbatch_size": 2,
    }


def faulty() -> dict[str, Any]:
    """The loss is divided by the number of ranks, as some loops of DDP do it."""

    def divided(model: nn.Module, batch: Any) -> Tensor:
        return mean_loss(model, batch) / torch.distributed.get_world_size()

    return check() | {"forward": divided}


def without_model() -> dict[str, Any]:
    return {"batch_fn": make_batch, "loss": mean_loss}


def with_layouts() -> dict[str, Any]:
    return check() | {"layouts": ["tp=2"]}


def with_typo() -> dict[str, Any]:
    return check() | {"microbatchsize": 2}


def three() -> int:
    return 3
