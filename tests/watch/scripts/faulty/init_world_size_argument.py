"""Started on each machine by hand; the size of the job is given on the command line."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args()


def setup(world_size):
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)  # WAITS
    return rank


def main():
    args = parse()
    rank = setup(args.world_size)
    model = DDP(torch.nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        x = torch.randn(4, 5)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
