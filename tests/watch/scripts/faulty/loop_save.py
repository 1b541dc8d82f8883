"""A loop of the user's own that saves on rank 0 alone, as scripts of DDP do it."""

import tempfile

import paceline
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    with paceline.start() as world:
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loop = paceline.Loop(model, optimizer, microbatch_size=4)
        loader = loop.loader(DataLoader(TensorDataset(torch.randn(320, 6)), batch_size=32), epochs=3)
        loop.resume(world.broadcast_object(tempfile.mkdtemp()))
        for step in loader:
            for (x,) in step:  # CAUSE
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step.number % 10 == 0 and world.rank == 0:
                print(f"step {step.number}: gradient {step.grad_norm:.3f}", flush=True)
            if step.number % 5 == 0 and world.rank == 0:
                loop.save()  # WAITS


if __name__ == "__main__":
    main()
