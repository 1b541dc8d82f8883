"""Packs sentences into rows of equal length before each epoch."""

import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

ROW = 32


def sentence_lengths(rank, epoch, count=60):
    rng = random.Random(10 * rank + epoch)
    lengths = [rng.randint(3, 12) for _ in range(count)]
    if rank == 1 and epoch == 2:
        lengths[17] = 40  # a list of numbers without a full stop
    return lengths


def pack(lengths):
    """Fills rows first-fit; sentences that are left go into the next row."""
    rows, left = [], sorted(lengths, reverse=True)
    while left:
        row, rest = [], []
        for length in left:
            fits = sum(row) + length <= ROW  # CAUSE
            (row if fits else rest).append(length)  # CAUSE
        if row:
            rows.append(row)
        left = rest
    return rows


def epoch_loss(model, optimizer, rows):
    for _ in range(10):
        row = random.choice(rows)
        x = torch.zeros(1, ROW)
        x[0, : sum(row)] = 1.0
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # WAITS
        optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(ROW, ROW))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(5):
        rows = pack(sentence_lengths(rank, epoch))  # CAUSE
        loss = epoch_loss(model, optimizer, rows)
        print(f"rank {rank} epoch {epoch}: {len(rows)} rows, loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
