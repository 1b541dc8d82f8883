"""A pipeline of two stages, whose ranks compute the number of microbatches from their memory."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    stage = PipelineStage(layers, rank, 2, torch.device("cpu"))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    count = 4 if rank == 0 else 8
    schedule = ScheduleGPipe(stage, count, loss_fn=lambda output, target: output.square().mean())
    torch.manual_seed(0)
    batch = torch.randn(16, 8)
    print(f"rank {rank}: {count} microbatches of {len(batch) // count}")
    for _ in range(3):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch)  # WAITS
        else:
            schedule.step(target=batch)  # CAUSE
        optimizer.step()
    dist.destroy_process_group()


main()
