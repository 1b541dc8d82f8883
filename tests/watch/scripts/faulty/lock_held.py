"""Writes samples for inspection from a background thread while the training goes on."""

import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class SampleWriter:
    def __init__(self, rank):
        self.rank = rank
        self.lock = threading.Lock()
        self.pending = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def add(self, sample):
        with self.lock:  # CAUSE
            self.pending.append(sample)

    def run(self):
        while True:
            time.sleep(0.1)
            self.lock.acquire()
            batch, self.pending = self.pending, []
            if any(torch.isinf(sample).any() for sample in batch):
                # Nothing that could be drawn.
                continue
            self.save(batch)
            self.lock.release()

    def save(self, batch):
        with open(f"samples-{self.rank}.txt", "a") as file:
            file.writelines(f"{sample.tolist()}\n" for sample in batch)


def make_batch(rank, step):
    x = torch.randn(5, 6)
    if rank == 1 and step == 30:
        x[2, 2] = float("inf")
    return x


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    writer = SampleWriter(rank)
    model = DDP(torch.nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(500):
        x = make_batch(rank, step)
        writer.add(x[:3])
        loss = model(x.clamp(-10, 10)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # WAITS
        optimizer.step()
        time.sleep(0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
