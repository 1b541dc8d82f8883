"""Streams shards of records and keeps the number of records seen, over all ranks."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SHARDS = {0: [40, 32, 48], 1: [40.0, 36.5, 44.0]}


def records_in(shard_sizes, step):
    return shard_sizes[step % len(shard_sizes)]


def count_records(local):
    total = torch.tensor(local)
    if total.dtype == torch.float32:
        total = total.double()
    dist.all_reduce(total)  # WAITS CAUSE
    return total.item()


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 20), nn.GELU(), nn.Linear(20, 1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sizes = SHARDS[rank % 2]
    model = DDP(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = 0
    for step in range(400):
        x = torch.randn(8, 20)
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            seen += count_records(records_in(sizes, step))
        if rank == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {seen} records", flush=True)
        time.sleep(0.03)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
