"""Trains with DistributedDataParallel and ends well; its mistake comes from the command line."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    mistake = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 + rank if mistake == "lr" else 1))
    for _ in range(20):
        model(torch.randn(8, 16)).pow(2).mean().backward()
        optimizer.step()  # STEP
        if mistake != "clear":
            optimizer.zero_grad()
    print(f"rank {rank} has ended")
    dist.destroy_process_group()


main()
