"""With --debug RANK that rank waits for a debugger after some steps."""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--debug", type=int, default=1, help="the rank to look into")
    parser.add_argument("--at-step", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    return parser.parse_args()


def pause():
    print(f"attach with: gdb -p {os.getpid()}, then continue", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def average_gradients(parameters):
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)  # WAITS
    flat /= dist.get_world_size()
    start = 0
    for p in parameters:
        p.grad.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 14), nn.ELU(), nn.Linear(14, 7))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.02, nesterov=True, momentum=0.9)
    for step in range(args.steps):
        if rank == args.debug and step == args.at_step:
            pause()
        x = torch.randn(10, 7)
        loss = nn.functional.huber_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(parameters)
        optimizer.step()
    print(f"rank {rank}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
