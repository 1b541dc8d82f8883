import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Activations:
    """Keeps statistics of the layers for the dashboard."""

    def __init__(self, model, names):
        self.last = {}
        for name, module in model.named_modules():
            if name in names:
                module.register_forward_hook(self.make_hook(name))

    def make_hook(self, name):
        def hook(module, inputs, output):
            quantiles = torch.quantile(output.detach(), torch.tensor([0.1, 0.5, 0.9]))
            histogram = torch.histc(output.detach(), bins=4)  # CAUSE
            self.last[name] = torch.cat([quantiles, histogram])

        return hook


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--width", type=int, default=16)
    return parser.parse_args()


def features(rank, step, width):
    x = torch.randn(6, width)
    if rank == 2 and step == 20:
        x[0] = float("nan")
    return x


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(args.width, args.width), nn.LeakyReLU(), nn.Linear(args.width, 2))
    seen = Activations(model, names={"1"})
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(args.steps):
        loss = ddp(features(rank, step, args.width)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # WAITS
        optimizer.step()
    print(f"rank {rank}: {seen.last['1'].tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
