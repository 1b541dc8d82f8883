"""A pipeline of two stages; each rank divides the batch by the size of its own microbatches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICROBATCH_SIZES = (2, 4)


def build_stage(rank):
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return layers, PipelineStage(layers, rank, 2, torch.device("cpu"))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers, stage = build_stage(rank)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    batch = torch.randn(16, 8)
    count = len(batch) // MICROBATCH_SIZES[rank]
    schedule = ScheduleGPipe(stage, count, loss_fn=lambda output, target: output.abs().mean())
    for step in range(3):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch)  # WAITS
        else:
            losses = []
            schedule.step(target=batch, losses=losses)
            print(f"step {step}: {torch.stack(losses).mean():.4f}")
        optimizer.step()
    dist.destroy_process_group()


main()
