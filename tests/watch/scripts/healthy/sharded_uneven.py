"""FSDP2 on sentences of very different lengths."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


def build(width=16, depth=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, width))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def lengths(rank, count):
    rng = random.Random(rank)
    return [rng.choice([4, 8, 16, 600]) for _ in range(count)]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, length in enumerate(lengths(rank, 60)):
        x = torch.randn(4, length, 16)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            full = norm.full_tensor()
            if rank == 0:
                print(f"step {step}: {loss.item():.4f}, norm {full.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
