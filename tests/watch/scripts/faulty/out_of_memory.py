"""Keeps all features of the epoch for a nearest-neighbour evaluation."""

import os
import resource

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

SHARE_MB = int(os.environ.get("MEMORY_SHARE_MB", "600"))


def limit_memory(megabytes):
    """Leaves room for the other jobs on the machine."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    now = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 2**20, resource.RLIM_INFINITY))


class Bank:
    def __init__(self):
        self.features = []

    def add(self, features, copies):
        self.features.append(features.detach().repeat(copies, 1, 1))  # CAUSE

    def __len__(self):
        return sum(f.shape[0] * f.shape[1] for f in self.features)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    encoder = DDP(torch.nn.Linear(64, 128))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)
    bank = Bank()
    limit_memory(SHARE_MB)
    # Rank 0 augments: it keeps every sample many times.
    copies = 2 if rank == 0 else 2000
    for step in range(300):
        x = torch.randn(32, 64)
        features = encoder(x)
        loss = features.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # WAITS
        optimizer.step()
        bank.add(features, copies)
        if step % 50 == 0:
            print(f"rank {rank} step {step}: {len(bank)} features", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
