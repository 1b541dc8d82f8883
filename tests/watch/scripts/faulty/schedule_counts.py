"""A pipeline of two stages, whose ranks compute the number of microbatches from their memory."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = PipelineStage(nn.Linear(8, 8), rank, 2, torch.device("cpu"))
    count = 4 if rank == 0 else 8
    schedule = ScheduleGPipe(stage, count, loss_fn=lambda output, target: output.square().mean())
    batch = torch.randn(16, 8)
    for _ in range(3):
        if rank == 0:
            schedule.step(batch)  # WAITS
        else:
            schedule.step(target=batch)  # CAUSE
    dist.destroy_process_group()


main()
