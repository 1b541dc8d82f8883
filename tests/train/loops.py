"""Trains one model by `Trainer` and by loops of a user's own, and returns a hash of the weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def hash_state(state: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


class Net(nn.Module):
    """Linear layers in blocks, with dropout, BatchNorm and a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 16)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.last(self.norm(x) * self.scale)
        return result


def build(seed: int = 0) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(seed)
    return Net(), TensorDataset(torch.randn(100, 6), torch.randn(100, 2))


def square(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[1]).square().mean()


def run_trainer(world: Any, layout: str, reduction: str, size: int) -> tuple[str, list[float]]:
    model, data = build()
    trainer = paceline.Trainer(
        model,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01),
        forward=lambda model, batch: model(batch[0]),
        loss=square,
        layout=layout,
        reduction=reduction,
        example=data[:4],
        microbatch_size=size,
        clip_norm=0.5,
    )
    losses = [trainer.step(batch).loss for batch in trainer.loader(data, global_batch_size=32, epochs=2)]
    return hash_state(trainer.whole_state()), losses


def run_loop(world: Any, layout: str, reduction: str, size: int, kind: str) -> tuple[str, list[float]]:
    model, data = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loop = paceline.Loop(
        model,
        optimizer,
        layout=layout,
        reduction=reduction,
        example=data[:4],
        forward=lambda model, batch: model(batch[0]),
        microbatch_size=size,
    )
    losses = []
    for step in loop.loader(DataLoader(data, batch_size=32, shuffle=True), epochs=2):
        for batch in step:
            loss = square(model(batch[0]), batch)
            if kind == "plain":
                loss.backward()
            else:
                step.backward(loss)
        step.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step.loss)
    return hash_state(loop.whole_state()), losses


def run(
    world: Any, kind: str, layout: str, reduction: str = "exact", size: int = 4
) -> tuple[str, list[float]]:
    if kind == "trainer":
        return run_trainer(world, layout, reduction, size)
    return run_loop(world, layout, reduction, size, kind)
