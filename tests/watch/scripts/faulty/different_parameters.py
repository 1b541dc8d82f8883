"""Averages gradients by hand; a frozen layer has none."""

import argparse

import torch
import torch.distributed as dist
from torch import nn


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--freeze-after", type=float, default=0.85, help="accuracy of the first layer's probe"
    )
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(9, 6)
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x)))


def probe(step, rank):
    """Accuracy of a probe on this rank's data."""
    return 0.5 + 0.01 * step + (0.2 if rank == 1 else 0.0)


def freeze(layer):
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None


def average_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)  # WAITS CAUSE
            parameter.grad /= dist.get_world_size()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(args.steps):
        if probe(step, rank) > args.freeze_after:
            freeze(model.embed)
        x = torch.randn(8, 9)
        loss = (model(x) - x[:, :6]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    print(f"rank {rank}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
