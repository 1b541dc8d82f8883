"""Compare the step time with each sink with that of the same training without one.

    pip install 'paceline[wandb,mlflow]'
    python benchmarks/sinks/run.py                        # steps of about 6 and 100 ms, in 6 minutes
    torchrun --nproc-per-node 2 benchmarks/sinks/run.py   # with a rank on each of two cores

All trainings live in the same processes and take turns in blocks of some seconds, in which the sinks get rows
several times. A ratio is that of a block to the block without sinks of the same round.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

sys.path.insert(0, str(Path(__file__).parents[1]))
from alternate import alternate

WAYS = {
    "no sink": [],
    "csv": ["csv"],
    "tensorboard": ["tensorboard"],
    "wandb": ["wandb"],
    "mlflow": ["mlflow"],
    "all four": ["csv", "tensorboard", "wandb", "mlflow"],
}
# Width of the network and steps of a block, for about 6 and 100 ms.
SIZES = {256: 400, 8192: 30}


def train(width: int, sinks: list[str], folder: Path) -> Iterator[paceline.Step]:
    """Yield the steps of a small network."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 64), torch.randn(4096, 1))
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))]
    trainer = paceline.Trainer(
        nn.Sequential(*layers, nn.Linear(64, 1)),
        forward=lambda model, batch: model(batch[0]),
        loss=lambda output, batch: ((output - batch[1]) ** 2).mean(),
        optimizer=lambda named: torch.optim.AdamW([each for _, each in named], lr=1e-3),
        sinks=sinks,
        microbatch_size=32,
    )
    loader = trainer.loader(data, global_batch_size=64, epochs=10_000)
    trainer.resume(folder)
    for batch in loader:
        yield trainer.step(batch)


def measure(world: paceline.World, width: int, rounds: int, folder: Path) -> list[str]:
    """Return a line per way."""
    loops: dict[str, Iterator[Any]] = {
        way: train(width, sinks, folder / f"{way}-{width}") for way, sinks in WAYS.items()
    }
    found = alternate(world, loops, num_blocks=rounds, block_steps=SIZES[width], warm_up=SIZES[width])
    base = found.block_s["no sink"]
    lines = []
    for way, times in found.block_s.items():
        low, middle, high = quantiles([time / plain for time, plain in zip(times, base, strict=True)])
        lines.append(
            f"{world.world_size} ranks  {way:12} step {1e3 * median(times) / SIZES[width]:6.2f} ms  "
            f"ratio {middle:.4f}, quartiles {low:.4f} to {high:.4f}, {rounds} blocks of {SIZES[width]}"
        )
    return lines


def main() -> None:
    """Measure both sizes and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--widths", type=int, nargs="+", default=list(SIZES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.environ |= {
            "WANDB_MODE": "offline",
            "MLFLOW_TRACKING_URI": Path(place, "mlflow").as_uri(),
            "MLFLOW_ALLOW_FILE_STORE": "true",
        }
        with paceline.start() as world:
            for width in args.widths:
                lines = measure(world, width, args.rounds, Path(place))
                if world.is_main:
                    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
