"""A sharded training in which one rank skips a bad batch, and so a whole forward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        batch = torch.randn(4, 8)
        if rank == 1 and step == 3:
            batch[0] = float("nan")
        if batch.isnan().any():
            continue
        model(batch).sum().backward()  # WAITS
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()  # CAUSE
    dist.destroy_process_group()


main()
