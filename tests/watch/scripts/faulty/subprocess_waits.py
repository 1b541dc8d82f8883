"""Copies every checkpoint to the file server with an outside program."""

import argparse
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

COPY = """
import pathlib, sys, time
lock = pathlib.Path(sys.argv[1] + ".lock")
while lock.exists():
    time.sleep(1)
print("copied", sys.argv[1])
"""


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=2)
    return parser.parse_args()


def copy(path):
    command = [sys.executable, "-c", COPY, path]
    subprocess.run(command, check=True)  # CAUSE


def save(model, path):
    # The lock tells the server's own backup to leave the file alone.
    with open(path + ".lock", "w") as lock:
        lock.write("training")
    torch.save(model.state_dict(), path)
    copy(path)


def train_epoch(model, optimizer):
    for _ in range(20):
        x = torch.randn(8, 8)
        loss = (model(x) - x.roll(1, dims=1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    args = parse()
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(1, args.epochs + 1):
        train_epoch(model, optimizer)
        if epoch % args.save_every == 0:
            if dist.get_rank() == 0:
                save(model.module, f"epoch{epoch}.pt")
            dist.barrier()  # WAITS
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
