"""Count the bytes that leave rank 0's node while a trainer is built; a rank of run.py's nodes.

python benchmarks/by_node/start.py INTERFACE       prints one JSON line on rank 0
"""

from __future__ import annotations

import json
import sys
import time

import torch
from sums import read_sent_bytes
from torch import nn

import paceline

_SETTLE_S = 0.3


def build(reduction: str) -> paceline.Trainer:
    torch.manual_seed(0)
    # 48 tensors, and buffers as a BatchNorm has.
    model = nn.Sequential(*(nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200)) for _ in range(12)))
    return paceline.Trainer(
        model,
        forward=lambda model, batch: model(batch[0]),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        microbatch_size=4,
        reduction=reduction,
    )


def main(interface: str) -> None:
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        found = {}
        for reduction in ("exact", "fast"):
            build(reduction)  # the first one also makes groups
            world.barrier()
            time.sleep(_SETTLE_S)
            before, start_s = read_sent_bytes(interface), time.perf_counter()
            trainer = build(reduction)
            took_s = time.perf_counter() - start_s
            time.sleep(_SETTLE_S)
            sent = read_sent_bytes(interface) - before
            (model,) = trainer.models.values()
            size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
            found[reduction] = {"model_bytes": size, "sent_bytes": sent, "seconds": took_s}
        if world.is_main:
            print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
