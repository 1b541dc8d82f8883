"""Meets at a monitored barrier after each epoch; ranks come at different times."""

import datetime
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train_epoch(model, optimizer, steps):
    for _ in range(steps):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sort(dim=1).values).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def write_samples(rank, epoch):
    """Some ranks have more samples to write."""
    time.sleep(0.8 * ((rank + epoch) % 3))
    with open(f"samples-{rank}-{epoch}.txt", "w") as file:
        file.write("sample\n" * (rank + 1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        loss = train_epoch(model, optimizer, steps=25)
        write_samples(rank, epoch)
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=30), wait_all_ranks=True)
        if rank == 0:
            print(f"epoch {epoch}: {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
