"""Prefetches batches in a thread."""

import queue
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

NUM_BATCHES = 40


class Prefetcher:
    def __init__(self, source, depth=4):
        self.source = source
        self.queue = queue.Queue(maxsize=depth)
        self.thread = threading.Thread(target=self.fill, daemon=True)
        self.thread.start()

    def fill(self):
        for batch in self.source:
            self.queue.put(batch)

    def __iter__(self):
        return self

    def __next__(self):
        batch = self.queue.get()  # CAUSE
        if batch is None:
            raise StopIteration
        return batch


def source(rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(NUM_BATCHES):
        x = torch.randn(8, 5, generator=generator)
        yield x, x.sum(dim=1, keepdim=True)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        for x, y in Prefetcher(source(rank)):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
