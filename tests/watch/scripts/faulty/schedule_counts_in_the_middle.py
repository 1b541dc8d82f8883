"""A pipeline of three stages with 1F1B; the middle one has another number of microbatches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = nn.Linear(8, 8)
    stage = PipelineStage(layer, rank, size, torch.device("cpu"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    count = {1: 6}.get(rank, 4)
    schedule = Schedule1F1B(stage, count, loss_fn=lambda output, target: output.square().mean())
    batch = torch.randn(24, 8)
    for _ in range(3):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch)  # WAITS
        elif rank == size - 1:
            schedule.step(target=batch)
        else:
            schedule.step()  # CAUSE
        optimizer.step()
    dist.destroy_process_group()


main()
