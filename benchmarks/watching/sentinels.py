"""Measures what following a script's numbers costs: blocks of steps with and without, in turn.

    python benchmarks/watching/sentinels.py                         # 200 pairs of blocks, about a minute
    python benchmarks/watching/sentinels.py --size 20M --pairs 8    # instead of 0.13M parameters

It prints the CPU time of the main thread per step, in the steady state (a look of 6 passes in each round of
512) and while every pass is looked at. Use an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.bench.spread import Spread
from paceline.watch.rank.first_not_finite import Gradients
from paceline.watch.rank.sentinels.sentinels import Sentinels

_NUM_STEPS = 512  # a whole round
_WIDTHS = {"0.13M": (256, 320, 128), "20M": (1024, 6144, 2304)}


class Training:
    """A training of which blocks of steps are timed."""

    def __init__(self, size: str) -> None:
        torch.manual_seed(0)
        first, wide, last = _WIDTHS[size]
        self.model = nn.Sequential(
            nn.Linear(first, wide), nn.ReLU(), nn.Linear(wide, last), nn.Linear(last, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(_NUM_STEPS * 32, first), torch.randint(0, 10, (_NUM_STEPS * 32,)))
        self.loader: DataLoader[Any] = DataLoader(data, batch_size=32)

    def run_block(self) -> float:
        """Return the seconds of CPU time per step of one round."""
        began_s = time.thread_time()
        for x, y in self.loader:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        return (time.thread_time() - began_s) / _NUM_STEPS


def measure(num_pairs: int, size: str) -> dict[str, list[float]]:
    """Return the seconds per step of each block, by way."""
    gradients = Gradients()
    gradients.install(torch)  # its hooks are there in each way
    training = Training(size)
    times: dict[str, list[float]] = {"off": [], "on": []}
    for number in range(num_pairs):
        for way in ("off", "on") if number % 2 else ("on", "off"):
            sentinels = Sentinels(gradients, lambda: 0)
            if way == "on":
                sentinels.install(torch)
                if not gradients.passes:
                    training.run_block()  # the first look is longer
            times[way].append(training.run_block())
            sentinels.end()
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--size", choices=_WIDTHS, default="0.13M")
    args = parser.parse_args()
    torch.set_num_threads(1)
    times = measure(args.pairs, args.size)
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    spread = Spread.of(ratios)
    print(f"off {1e6 * statistics.median(times['off']):.0f} us per step, with looks times {spread:.4f}")


if __name__ == "__main__":
    main()
