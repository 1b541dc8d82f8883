"""A training script that starts its ranks itself, at a port of its own."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, world_size: int, port: int, folder: str) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(1, 200):
        optimizer.zero_grad()
        model(torch.randn(7, 16)).square().mean().backward()
        optimizer.step()
        with open(f"{folder}/{rank}", "w", encoding="utf-8") as file:
            file.write(f"{number} {os.getppid()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    num_ranks = int(sys.argv[2])
    mp.spawn(train, args=(num_ranks, int(sys.argv[3]), sys.argv[1]), nprocs=num_ranks, join=True)
