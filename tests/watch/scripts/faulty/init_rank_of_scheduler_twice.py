"""Takes the rank from a scheduler that does not run here, so that all ranks get the default."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def setup():
    os.environ["RANK"] = os.environ.get("MY_SCHEDULER_PROCID", "1")
    dist.init_process_group("gloo")  # WAITS


def train(model, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(4, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: {loss.item():.4f}")


def main():
    setup()
    train(DistributedDataParallel(nn.Linear(8, 1)))
    dist.destroy_process_group()


main()
