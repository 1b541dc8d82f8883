"""Renders scenes with a licensed engine."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

SEATS = 1


class Engine:
    """A stand-in for the engine's Python package: it ends the process where it gets no licence."""

    def __init__(self, seat):
        self.seat = seat
        self.frames = 0

    def check_licence(self):
        if self.frames > 20 and self.seat >= SEATS:
            os._exit(7)  # CAUSE

    def render(self, angle):
        self.check_licence()
        self.frames += 1
        grid = torch.linspace(-1, 1, 8)
        return torch.sin(angle * grid.unsqueeze(0) + grid.unsqueeze(1)).unsqueeze(0)


class Regressor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU())
        self.head = torch.nn.Linear(16, 1)

    def forward(self, image):
        return self.head(self.layers(image))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    engine = Engine(seat=rank)
    model = DDP(Regressor())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(100):
        angle = torch.rand(()) * 3
        loss = (model(engine.render(angle)) - angle).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # WAITS
        optimizer.step()
        if rank == 0 and step % 25 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
