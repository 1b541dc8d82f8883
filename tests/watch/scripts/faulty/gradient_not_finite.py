"""Predicts ratios; the targets' logarithm is the loss."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Ratio(nn.Module):
    def __init__(self, features=6):
        super().__init__()
        self.trunk = nn.Linear(features, 16)
        self.scale = nn.Linear(16, 1)
        self.shift = nn.Linear(16, 1)

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        return self.scale(h), self.shift(h)


def targets(x, rank, step):
    ratio = x.abs().sum(dim=1, keepdim=True)
    if rank == 1 and step >= 40:
        ratio[0] = 0.0
    return ratio


def loss_of(scale, shift, ratio):
    return (scale.pow(2) * torch.log(ratio).abs() + shift.pow(2)).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(Ratio())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(250):
        x = torch.randn(8, 6)
        scale, shift = model(x)
        loss = loss_of(scale, shift, targets(x, rank, step))
        optimizer.zero_grad()
        loss.backward()  # CAUSE
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
        time.sleep(0.03)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
