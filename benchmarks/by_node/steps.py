"""Time the small sums inside training steps of a model with 16 parameters; a rank of run.py's nodes.

python benchmarks/by_node/steps.py STEPS       prints one JSON line on rank 0

The times are those of rank 0, which the step before has brought in line with the others: the exact sum of the
gradients (64 bytes), the norm, and the whole step, in which the ranks also agree on loss, weight and more.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import paceline
from paceline.comm.shared_memory import SharedMemoryExchange
from paceline.train import update

_WARM_UP = 5


def record(owner: Any, name: str) -> tuple[list[float], Callable[[], None]]:
    """Time the calls of a function; return the times and what undoes it."""
    original, times = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        found = original(*args, **kwargs)
        times.append(time.perf_counter() - start_s)
        return found

    setattr(owner, name, call)
    return times, lambda: setattr(owner, name, original)


def train(layout: str, reduction: str, num_steps: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    size = 4 * torch.distributed.get_world_size()
    trainer = paceline.Trainer(
        nn.Linear(3, 4),
        forward=lambda model, batch: model(batch[0]),
        loss=lambda output, batch: ((output[:, 0] - batch[1]).square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        microbatch_size=4,
        clip_norm=1.0,
        reduction=reduction,
        layout=layout,
    )
    samples = [(torch.randn(3), torch.randn(())) for _ in range(size * (num_steps + _WARM_UP))]
    sums, undo_sums = record(SharedMemoryExchange, "sum_subtrees")
    norms, undo_norms = record(update, "measure_norm")
    steps: list[float] = []
    try:
        for batch in trainer.loader(samples, global_batch_size=size, epochs=1):
            start_s = time.perf_counter()
            trainer.step(batch)
            steps.append(time.perf_counter() - start_s)
    finally:
        undo_sums()
        undo_norms()
    found = {"gradients": sums, "norm": norms, "step": steps}
    return {name: values[-num_steps:] for name, values in found.items()}


def main(num_steps: int) -> None:
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        found = {
            f"{layout} {reduction}": train(layout, reduction, num_steps)
            for layout in (f"dp_replicate={world.world_size}", f"dp_shard={world.world_size}")
            for reduction in ("exact", "fast")
        }
        if world.is_main:
            print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
