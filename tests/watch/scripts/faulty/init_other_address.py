"""Reads the address of the main machine from the cluster's host file."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

HOSTS = """
# name      address
login       127.0.0.1
trainer-0   127.0.0.1
trainer-1   10.255.255.1
"""


def read_hosts(text):
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return dict(rows)


def main_address(rank):
    hosts = read_hosts(HOSTS)
    return hosts[f"trainer-{rank}"]


def setup():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"]) + 1
    url = f"tcp://{main_address(rank)}:{port}"
    dist.init_process_group("gloo", url, timedelta(minutes=10), world_size, rank)  # WAITS CAUSE
    return rank


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = model(torch.randn(8, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    rank = setup()
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 6))
    print(f"rank {rank}: {train(net, steps=30):.4f}", flush=True)
    dist.destroy_process_group()
