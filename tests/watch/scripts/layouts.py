"""Trains a small model under one layout after another, with experts under ep, and prints the bits of each.

layouts.py LAYOUT ...     an exclamation mark after a layout stands for reduction="exact"
"""

from __future__ import annotations

import sys

import paceline
import torch
import torch.nn.functional as F
from paceline.checkpoint import hash_tensors
from paceline.models.moe import Experts, ask_experts, count_choices
from torch import Tensor, nn


class Mixture(nn.Module):
    """A router, and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4, bias=False), Experts(4, 16, 8)
        for weight in self.experts.parameters():
            nn.init.normal_(weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        counts = count_choices(chosen, 4)
        answers = ask_experts(flat, chosen, lambda rows: self.experts(rows, counts))
        return (answers * weights[..., None]).sum(1).view_as(x)


class Block(nn.Module):
    def __init__(self, *, has_experts: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.after = nn.LayerNorm(16)
        self.mixture = Mixture() if has_experts else nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        heads = [each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mixture(self.after(x))


class Model(nn.Module):
    def __init__(self, *, has_experts: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block(has_experts=has_experts) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def measure(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), ids.flatten())


def train(layout: str) -> str:
    torch.manual_seed(0)
    rows = list(torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(1)))
    trainer = paceline.Trainer(
        Model(has_experts="ep=" in layout),
        loss=measure,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        layout=layout.rstrip("!"),
        reduction="exact" if layout.endswith("!") else "fast",
        microbatch_size=2,
        clip_norm=1.0,
        example=torch.stack(rows[:2]),
    )
    steps = [trainer.step(batch) for batch in trainer.loader(rows, global_batch_size=8, epochs=1)]
    plain = Model(has_experts="ep=" in layout)
    trainer.gather_into(plain)
    trainer.close()
    numbers = [(step.loss, step.grad_norm) for step in steps]
    return f"{layout} | {numbers} | {hash_tensors(plain.state_dict())[:16]}"


if __name__ == "__main__":
    with paceline.start(threads_per_rank=1) as world:
        for each in sys.argv[1:]:
            text = train(each)
            if world.is_main:
                print(text, flush=True)
