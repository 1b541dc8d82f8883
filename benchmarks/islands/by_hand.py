"""Measures the step of islands against a loop of DiLoCo written by hand, on two ranks of this machine.

    python benchmarks/islands/by_hand.py

Periods of 20 steps alternate on the same ranks: `Trainer(islands=)`, and plain torch with an all-reduce per
parameter. Both clip, and take the same samples, so their weights agree. The ratio of each pair of periods is
added to by_hand.jsonl beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paceline

HERE = Path(__file__).parent
EVERY, SAMPLES = 20, 32


def build_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(8) for each in (nn.Linear(width, width), nn.GELU())))


def build_optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-4)


class ByHand:
    """One island of DiLoCo in plain torch."""

    def __init__(self, width: int) -> None:
        self.model = build_model(width)
        self._inner = build_optimizer(list(self.model.named_parameters()))
        self.shared = [p.detach().clone() for p in self.model.parameters()]
        self._outer = torch.optim.SGD(self.shared, lr=0.9, momentum=0.6, nesterov=True)

    def step(self, batch: torch.Tensor) -> None:
        loss = self.model(batch).square().sum() / len(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._inner.step()
        self._inner.zero_grad()

    @torch.no_grad()
    def exchange(self) -> None:
        for shared, own in zip(self.shared, self.model.parameters(), strict=True):
            shared.grad = shared - own
            dist.all_reduce(shared.grad)
            shared.grad /= dist.get_world_size()
        self._outer.step()
        for shared, own in zip(self.shared, self.model.parameters(), strict=True):
            own.copy_(shared)


def measure(width: int, num_pairs: int) -> dict[str, Any]:
    """Return the seconds of each period of both loops, and how far their weights are apart."""
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        by_hand = ByHand(width)
        trainer = paceline.Trainer(
            build_model(width),
            loss=lambda output, batch: (output.square().sum(), len(output)),
            optimizer=build_optimizer,
            microbatch_size=SAMPLES // 2,
            islands={"count": 2, "every": EVERY, "warmup_steps": 0},
        )
        num_steps = EVERY * (num_pairs + 1)
        data = torch.randn(SAMPLES * num_steps, width, generator=torch.Generator().manual_seed(1))
        shares = iter(trainer.loader(data, global_batch_size=SAMPLES, shuffle=False))
        times: dict[str, list[float]] = {"islands": [], "by hand": []}
        for pair in range(num_pairs + 1):
            for kind in ("islands", "by hand") if pair % 2 else ("by hand", "islands"):
                dist.barrier()
                start_s = time.perf_counter()
                for step in range(pair * EVERY, pair * EVERY + EVERY):
                    if kind == "islands":
                        trainer.step(next(shares))
                    else:
                        at = step * SAMPLES + world.rank * SAMPLES // 2
                        by_hand.step(data[at : at + SAMPLES // 2])
                if kind == "by hand":
                    by_hand.exchange()
                dist.barrier()
                if pair:
                    times[kind].append(time.perf_counter() - start_s)
        pairs = zip(by_hand.shared, trainer.model.parameters(), strict=True)
        return {**times, "apart": max(float((a - b.detach()).abs().max()) for a, b in pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--pairs", type=int, default=20)
    args = parser.parse_args()
    print("| parameters | ratio of the medians of pairs | s per period | weights apart |\n|---|---|---|---|")
    for width in args.width:
        found = paceline.launch(measure, 2, args=(width, args.pairs))[0]
        ratios = [a / b for a, b in zip(found["islands"], found["by hand"], strict=True)]
        row = {"load": os.getloadavg()[0], "width": width, "ratio": statistics.median(ratios), **found}
        with (HERE / "by_hand.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        size = 8 * (width * width + width)
        spread = statistics.quantiles(ratios)
        seconds = statistics.median(found["islands"])
        print(
            f"| {size / 1e6:.1f}M | {statistics.median(ratios):.3f} ({spread[0]:.3f} to {spread[2]:.3f}) "
            f"| {seconds:.2f} | {found['apart']:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
