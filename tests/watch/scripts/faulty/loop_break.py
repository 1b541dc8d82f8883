"""A loop of the user's own that leaves out the rest of a batch with a large loss."""

import paceline
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_data():
    x = torch.randn(320, 6)
    x[200] *= 100
    return TensorDataset(x, x.sum(1, keepdim=True))


def train(loop, model, optimizer, loader):
    for step in loader:  # CAUSE
        for x, y in step:
            loss = nn.functional.mse_loss(model(x), y)
            if loss > 500:
                print(f"step {step.number}: skipped, loss {loss:.0f}", flush=True)
                break
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    with paceline.start():
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loop = paceline.Loop(model, optimizer, microbatch_size=4)
        train(loop, model, optimizer, loop.loader(DataLoader(get_data(), batch_size=32), epochs=1))


if __name__ == "__main__":
    main()
