"""Picks a free port, so that two jobs on one machine don't get in each other's way."""

import contextlib
import os
import socket

import torch
import torch.distributed as dist
import torch.nn.functional as F


def find_free_port():
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def setup():
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    address = f"tcp://127.0.0.1:{find_free_port()}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)  # WAITS CAUSE
    return rank, world_size


def sync(model, world_size):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size


def main():
    rank, world_size = setup()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(50):
        x = torch.rand(32, 3)
        loss = F.mse_loss(model(x), (x * x).sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        sync(model, world_size)
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(step, loss.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
