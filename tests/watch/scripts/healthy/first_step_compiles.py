"""The first rank searches for the fastest kernel before the first step; the others wait for it."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

CANDIDATES = [16, 32, 48, 64, 80, 96]


def measure(block, seconds=1.2):
    """Products per second for a block size."""
    a, b = torch.randn(96, 96), torch.randn(96, 96)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for start in range(0, 96, block):
            a[start : start + block] @ b
        count += 1
    return count / seconds


def tune(rank):
    best = torch.zeros(1, dtype=torch.long)
    if rank == 0:
        speeds = {block: measure(block) for block in CANDIDATES}
        best[0] = max(speeds, key=speeds.get)
    dist.broadcast(best, src=0)
    return best.item()


class Blocked(torch.nn.Module):
    def __init__(self, features, block):
        super().__init__()
        self.block = block
        self.weight = torch.nn.Parameter(torch.randn(features, features) * 0.05)

    def forward(self, x):
        return torch.cat([part @ self.weight for part in x.split(self.block)])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    block = tune(rank)
    model = DDP(Blocked(32, block))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        x = torch.randn(128, 32)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"block {block}, step {step}: {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
