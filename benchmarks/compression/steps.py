"""Time training steps with and without compression; a rank of run.py's nodes.

python benchmarks/compression/steps.py TURNS INTERFACE       prints one JSON line on rank 0

Each turn takes one step of each kind, forwards or backwards through the list. A step begins after a barrier
and lasts until the last rank's end. `fast` is the library's all-reduce in DDP's buckets, `exact` the
uncompressed exact reduction.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paceline

KINDS = ("fast", "exact", "bf16", "int8", "int4")
WIDTH, NUM_LAYERS, NUM_SAMPLES = 1024, 18, 32


def build(kind: str) -> paceline.Trainer:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"reduction": "fast" if kind == "fast" else "exact"}
    if kind not in ("fast", "exact"):
        settings["compress"] = {"kind": kind}
    layers = [each for _ in range(NUM_LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return paceline.Trainer(
        nn.Sequential(*layers),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-4),
        microbatch_size=NUM_SAMPLES,
        **settings,
    )


def read_sent(interface: str) -> int:
    """Return the bytes that this node has sent; the ninth number of a line of Linux's table."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    [line] = [line for line in lines if line.strip().startswith(f"{interface}:")]
    return int(line.partition(":")[2].split()[8])


def main(num_turns: int, interface: str) -> None:
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        trainers = {kind: build(kind) for kind in KINDS}
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        alone: list[float] = []
        sent: dict[str, list[int]] = {kind: [] for kind in KINDS}
        batch = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(world.rank))
        for turn in range(num_turns + 1):
            for kind in KINDS if turn % 2 else KINDS[::-1]:
                dist.barrier()
                before, start_s = read_sent(interface), time.perf_counter()
                trainers[kind].step(batch)
                dist.barrier()
                if turn:
                    times[kind].append(time.perf_counter() - start_s)
                    sent[kind].append(read_sent(interface) - before)
        silent = build("fast")
        with silent.without_communication():
            for turn in range(num_turns + 1):
                start_s = time.perf_counter()
                silent.step(batch)
                if turn:
                    alone.append(time.perf_counter() - start_s)
        if world.is_main:
            num_parameters = trainers["fast"].count_parameters()
            print(json.dumps({"parameters": num_parameters, "times": times, "sent": sent, "alone": alone}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
