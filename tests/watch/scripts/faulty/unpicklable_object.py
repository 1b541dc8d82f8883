"""Collects what every rank has seen at the end of an epoch."""

import collections
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Statistics:
    def __init__(self):
        self.counts = collections.Counter()
        self.lock = None

    def use_threads(self):
        self.lock = threading.Lock()

    def add(self, labels):
        self.counts.update(labels.tolist())


def gather(statistics):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, statistics)  # WAITS CAUSE
    return sum((s.counts for s in everyone), collections.Counter())


def train(model, optimizer, statistics, steps):
    for _ in range(steps):
        x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        statistics.add(y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        statistics = Statistics()
        if epoch > 0 and rank == 1:
            statistics.use_threads()
        train(model, optimizer, statistics, steps=20)
        counts = gather(statistics)
        if rank == 0:
            print(f"epoch {epoch}: {dict(counts)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
