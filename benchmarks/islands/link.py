"""Measures islands over a slow link between two nodes: 100 Mbit/s, a round trip of 50 ms; needs root.

    python benchmarks/islands/link.py
    python benchmarks/islands/link.py --rate 20 --round-trip 100 --only alone --only "islands every=50 int4"

The nodes are network namespaces of this machine. A microbatch takes as long as a rank sleeps, as on an
accelerator of its own; sums, codecs and the optimizer are real. Each turn takes a period of steps of islands,
and single steps of what communicates in each, forwards or backwards through the list. `alone`
communicates nothing. The result is added to link.jsonl beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import paceline  # noqa: E402

COMPUTE_S = 0.25
WIDTH, NUM_LAYERS = 1024, 18
# Steps per turn, and arguments.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (20, {"reduction": "fast"}),
    "fast": (1, {"reduction": "fast"}),
    "exact": (1, {"reduction": "exact"}),
    "int4": (1, {"reduction": "exact", "compress": {"kind": "int4"}}),
    "islands every=20": (20, {"islands": {"every": 20}}),
    "islands every=20 int8": (20, {"islands": {"every": 20, "codec": "int8"}}),
    "islands every=20 int4": (20, {"islands": {"every": 20, "codec": "int4"}}),
    "islands every=40 int4": (40, {"islands": {"every": 40, "codec": "int4"}}),
    "islands every=50 int8": (50, {"islands": {"every": 50, "codec": "int8"}}),
    "islands every=50 int4": (50, {"islands": {"every": 50, "codec": "int4"}}),
}


def build(settings: dict[str, Any]) -> paceline.Trainer:
    torch.manual_seed(0)
    layers = [each for _ in range(NUM_LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    islands = settings.get("islands")

    def loss(output: torch.Tensor, batch: torch.Tensor) -> Any:
        time.sleep(COMPUTE_S)
        return output.square().sum(), len(output)

    return paceline.Trainer(
        nn.Sequential(*layers),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-4),
        microbatch_size=2,
        **settings | ({"islands": {"count": 2, "warmup_steps": 0, **islands}} if islands else {}),
    )


def measure(kinds: list[str], limit_s: float) -> None:
    began_s = time.perf_counter()
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        trainers = {kind: build(settings) for kind, (_, settings) in KINDS.items() if kind in kinds}
        samples = torch.randn(4 * 250, WIDTH, generator=torch.Generator().manual_seed(0))
        loaders = {
            kind: each.loader(samples, global_batch_size=4, epochs=9) for kind, each in trainers.items()
        }
        steps = {kind: iter(loader) for kind, loader in loaders.items()}
        times: dict[str, list[float]] = {kind: [] for kind in trainers}
        turn = 0
        while True:
            turn_s = time.perf_counter()
            for kind in trainers if turn % 2 else list(trainers)[::-1]:
                num_steps = KINDS[kind][0]
                dist.barrier()
                start_s = time.perf_counter()
                if kind == "alone":
                    with trainers[kind].without_communication():
                        for _ in range(num_steps):
                            trainers[kind].step(next(steps[kind]))
                else:
                    for _ in range(num_steps):
                        trainers[kind].step(next(steps[kind]))
                dist.barrier()
                if turn:
                    times[kind].append((time.perf_counter() - start_s) / num_steps)
            now_s = time.perf_counter()
            spent = torch.tensor(now_s - began_s + 1.2 * (now_s - turn_s))
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if world.is_main and turn:
                print(json.dumps({"turns": turn, "times": times}), flush=True)
            if float(spent) > limit_s:
                return
            turn += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s")
    parser.add_argument("--round-trip", type=float, default=50, help="ms")
    parser.add_argument("--only", action="append", choices=KINDS, help="kinds to run; default: all")
    parser.add_argument("--limit", type=float, default=500, help="seconds that all turns may take")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    kinds = args.only or list(KINDS)
    if args.rank:
        measure(kinds, args.limit)
        return
    from tests.launching.nodes import why_no_nodes
    from tests.launching.on_nodes import run_on_nodes

    if reason := why_no_nodes():
        raise SystemExit(f"nodes cannot be made here: {reason}")
    words = [sys.executable, "-W", "ignore", str(Path(__file__)), "--rank", "--limit", str(args.limit)]
    words += [word for kind in kinds for word in ("--only", kind)]
    out = run_on_nodes((0, 1), args.rate, words, args.round_trip)
    found = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
    row = {
        "load": os.getloadavg()[0],
        "compute_s": COMPUTE_S,
        "mbit": args.rate,
        "round_trip_ms": args.round_trip,
    }
    with (HERE / "link.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | found) + "\n")
    print(f"| {found['turns']} turns | s per step | of the tokens/s without communication |\n|---|---|---|")
    for kind, times in found["times"].items():
        shares = [alone / own for alone, own in zip(found["times"]["alone"], times, strict=True)]
        print(f"| {kind} | {statistics.median(times):.2f} | {statistics.median(shares):.2f} |")


if __name__ == "__main__":
    main()
