"""Times the two loops against each other in the same ranks, in short alternating blocks."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from loops import LOOPS, Job

import paceline


@dataclass(frozen=True)
class Times:
    """What one rank measured.

    Attributes:
        block_s: per loop, seconds of each of its blocks, in order of time.
        block_cpu_s: per loop, the seconds that this process, all its threads, computed in them.
        losses: per loop, the loss after the first steps: the mean over this global batch.
        num_parameters: of the whole model.
    """

    block_s: dict[str, list[float]]
    block_cpu_s: dict[str, list[float]]
    losses: dict[str, float]
    num_parameters: int


def run_rank(job: Job, num_blocks: int, block_steps: int, warm_up: int) -> Times:
    """Runs on every rank: a block of each loop, then the same in the other order, and so on.

    Both loops live in this process, each with its model, optimizer and loader. A block starts behind a
    barrier.
    """
    warnings.simplefilter("ignore")  # of torch, about itself
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        loops = {name: loop(job) for name, loop in LOOPS.items()}
        block_s: dict[str, list[float]] = {name: [] for name in loops}
        block_cpu_s: dict[str, list[float]] = {name: [] for name in loops}
        last: dict[str, Any] = {}

        def run_block(name: str, steps: int) -> tuple[float, float]:
            world.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                last[name] = next(loops[name])
            return time.perf_counter() - start_s, time.process_time() - start_cpu_s

        for name in loops:
            run_block(name, warm_up)
        losses = {name: float(loss) for name, loss in last.items()}
        # By hand it is the loss of this rank's last microbatch; with one microbatch, their mean is the loss.
        found: list[Any] = [None] * world.world_size
        dist.all_gather_object(found, losses)
        losses = {name: sum(each[name] for each in found) / len(found) for name in loops}
        for number in range(num_blocks):
            for name in loops if number % 2 == 0 else reversed(loops):
                taken_s, computed_s = run_block(name, block_steps)
                block_s[name].append(taken_s)
                block_cpu_s[name].append(computed_s)
        world.barrier()
        num_parameters = sum(p.numel() for p in job.build_model().parameters())
    return Times(block_s, block_cpu_s, losses, num_parameters)
