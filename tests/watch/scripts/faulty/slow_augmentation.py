import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 360


def rotate(rows):
    return [list(row) for row in zip(*rows[::-1], strict=True)]


def augment(image, times):
    """Rotates and flips an image of Python lists."""
    for _ in range(times):
        image = rotate(image)  # CAUSE
        if random.random() < 0.5:
            image = [row[::-1] for row in image]
    return image


def make_batch(rank, size=4):
    images = [[[random.random() for _ in range(12)] for _ in range(12)] for _ in range(size)]
    # The rare classes, which the last rank has, are varied more.
    times = 1 if rank < int(os.environ["WORLD_SIZE"]) - 1 else 4500
    return torch.tensor([augment(image, times) for image in images]).unsqueeze(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(400, 4)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).flatten(1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    random.seed(rank)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss = nn.functional.cross_entropy(model(make_batch(rank)), torch.arange(4))
        optimizer.zero_grad()
        loss.backward()  # WAITS
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
