"""Ranks use different heads of the model, which DDP is told to expect."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoHeads(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.trunk = nn.Linear(width, width)
        self.heads = nn.ModuleDict({"left": nn.Linear(width, 1), "right": nn.Linear(width, 4)})

    def forward(self, x, head):
        return self.heads[head](torch.relu(self.trunk(x)))


def choose(rank, step):
    return "left" if (rank + step // 5) % 2 else "right"


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(100):
        head = choose(rank, step)
        loss = model(torch.randn(6, 10), head).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if head == "left" and step % 25 == 0:
            # The left head's samples are drawn, which takes a moment.
            time.sleep(0.8)
            print(f"rank {rank} step {step}: {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
