"""Three stages; activations go forward and gradients back, microbatch by microbatch."""

import time

import torch
import torch.distributed as dist
from torch import nn

MICROBATCHES, SIZE, WIDTH = 4, 3, 10


class Stage:
    def __init__(self, rank, size):
        self.rank = rank
        self.is_first, self.is_last = rank == 0, rank == size - 1
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.05)

    def forward(self):
        x = torch.randn(SIZE, WIDTH)
        if not self.is_first:
            dist.recv(x, src=self.rank - 1)
            x.requires_grad_()
        y = self.layers(x)
        if not self.is_last:
            dist.isend(y.detach(), dst=self.rank + 1).wait()
        return x, y

    def backward(self, x, y):
        if self.is_last:
            y.pow(2).mean().backward()
        else:
            gradient = torch.empty_like(y)
            dist.irecv(gradient, src=self.rank + 1).wait()
            y.backward(gradient)
        if not self.is_first:
            dist.send(x.grad, dst=self.rank - 1)

    def step(self):
        kept = [self.forward() for _ in range(MICROBATCHES)]
        for x, y in kept:
            self.backward(x, y)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return kept[-1][1].detach().pow(2).mean().item()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = Stage(rank, size)
    for step in range(60):
        loss = stage.step()
        if stage.is_last and step % 20 == 0:
            print(f"step {step}: {loss:.4f}", flush=True)
            time.sleep(1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
