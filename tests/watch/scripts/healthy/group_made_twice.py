"""Pretraining and fine-tuning in one script, each with groups of its own, which are given back."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def run_phase(name, net, steps, lr):
    rank = dist.get_rank()
    everyone = dist.new_group(group_desc=name)
    half = dist.new_group([0], group_desc=f"{name}-writers")
    model = DDP(net, process_group=everyone)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        x = torch.randn(8, 6)
        loss = (model(x) - x.cumsum(dim=1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        dist.barrier(group=half)
        print(f"{name}: {loss.item():.4f}", flush=True)
    dist.barrier(group=everyone)
    dist.destroy_process_group(everyone)


def between(rank):
    """Looks at the weights before going on."""
    time.sleep(1.5 if rank == 0 else 0.2)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    run_phase("pretraining", net, steps=40, lr=0.1)
    between(dist.get_rank())
    for parameter in net[0].parameters():
        parameter.requires_grad_(False)
    run_phase("tuning", net, steps=20, lr=0.02)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
