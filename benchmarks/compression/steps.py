"""Time training steps with and without compression; a rank of run.py's nodes.

python benchmarks/compression/steps.py TURNS LIMIT_S INTERFACE

Each turn takes one step of each kind, forwards or backwards through the list. A step begins after a barrier
and lasts until the last rank's end. `fast` is the library's all-reduce in DDP's buckets, `exact` the
uncompressed exact reduction. No turn begins that would probably end after LIMIT_S seconds. Rank 0 writes a
line per step to stderr, and after each turn one JSON line with everything so far to stdout.
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


def main(num_turns: int, limit_s: float, interface: str) -> None:
    began_s = time.perf_counter()
    with paceline.start(device="cpu", threads_per_rank=1) as world:

        def note(text: str) -> None:
            if world.is_main:
                print(f"{time.perf_counter() - began_s:6.1f} s  {text}", file=sys.stderr, flush=True)

        trainers = {kind: build(kind) for kind in KINDS}
        note("trainers built")
        alone = time_alone(num_turns, torch.randn(NUM_SAMPLES, WIDTH))
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        sent: dict[str, list[int]] = {kind: [] for kind in KINDS}
        batch = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(world.rank))
        longest_s = 0.0
        for turn in range(num_turns + 1):
            turn_s = time.perf_counter()
            # Ranks agree, on the slowest clock.
            spent = torch.tensor(turn_s - began_s + longest_s)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if turn > 1 and float(spent) > limit_s:
                note(f"no time for turn {turn} of {num_turns}")
                break
            for kind in KINDS if turn % 2 else KINDS[::-1]:
                dist.barrier()
                before, start_s = read_sent(interface), time.perf_counter()
                trainers[kind].step(batch)
                dist.barrier()
                step_s = time.perf_counter() - start_s
                note(f"turn {turn} of {num_turns}: {kind} {step_s:.2f} s")
                if turn:
                    times[kind].append(step_s)
                    sent[kind].append(read_sent(interface) - before)
            longest_s = max(longest_s, time.perf_counter() - turn_s)
            if world.is_main and turn:
                num_parameters = trainers["fast"].count_parameters()
                found = {"parameters": num_parameters, "times": times, "sent": sent, "alone": alone}
                print(json.dumps(found), flush=True)


def time_alone(num_turns: int, batch: torch.Tensor) -> list[float]:
    """Return the seconds of steps without communication."""
    silent = build("fast")
    alone = []
    with silent.without_communication():
        for turn in range(num_turns + 1):
            start_s = time.perf_counter()
            silent.step(batch)
            if turn:
                alone.append(time.perf_counter() - start_s)
    return alone


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
