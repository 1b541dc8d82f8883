"""A course's build-along, as a student types it. It notes the clock after each step.

torchrun --nproc-per-node 2 chapter.py CLOCK
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB, BATCH, LENGTH = 2000, 8, 32


class BenchmarkTransformer(nn.Module):
    def __init__(self, d_model: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, d_model)
        self.positions = nn.Embedding(512, d_model)
        layer = nn.TransformerEncoderLayer(d_model, 8, 256, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(d_model, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))))


def benchmark_scaling(rank: int, world_size: int, num_steps: int = 200) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(BenchmarkTransformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with open(f"{sys.argv[1]}-{world_size}-{rank}", "a", buffering=1) as clock:
        print("start", file=clock)
        for _ in range(num_steps):
            x = torch.randint(0, VOCAB, (BATCH, LENGTH))
            y = torch.randint(0, VOCAB, (BATCH, LENGTH))
            logits = model(x)
            loss = nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(repr(time.perf_counter()), file=clock)
    dist.destroy_process_group()


if __name__ == "__main__":
    benchmark_scaling(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
