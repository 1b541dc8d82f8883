"""A loop of the user's own with sharded parameters, where one rank has no loss to run backward of."""

import paceline
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


def get_data():
    torch.manual_seed(0)
    labels = torch.randint(0, 8, (128,))
    labels[68:72] = -100  # samples without a label
    return TensorDataset(torch.randn(128, 8), labels)


def train(loader, model, optimizer):
    for step in loader:
        for x, y in step:  # CAUSE
            kept = y != -100
            output = model(x)
            if kept.any():
                nn.functional.cross_entropy(output[kept], y[kept]).backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    with paceline.start():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loop = paceline.Loop(model, optimizer, layout="dp_shard=2", microbatch_size=4)
        train(loop.loader(DataLoader(get_data(), batch_size=16), epochs=2), model, optimizer)


if __name__ == "__main__":
    main()
