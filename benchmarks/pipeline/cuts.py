"""Step time of the cut that Paceline finds against the even one, on a model of unequal blocks.

    python benchmarks/pipeline/cuts.py                 # 40 steps of each cut, on 2 ranks
    python benchmarks/pipeline/cuts.py --blocks 6      # a quick look

Prints two ratios. That of step times depends on what else the machine runs. That of the CPU seconds of the
rank that computes most hardly does: it shows how differently the stages are cut.

Five narrow blocks are followed by three of four times their width, and a head has half of the operations of
all blocks. Four blocks per stage leave 84% of the operations to one rank, the found cut 51%.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from alternate import BlockTimes, Conditions, alternate, join_ranks
from torch import Tensor, nn

import paceline
from paceline.bench.spread import Spread
from paceline.launching.local import launch

HERE = Path(__file__).parent
WIDTH, NUM_RANKS, NUM_MICROBATCHES = 256, 2, 8
INNER = [*[WIDTH] * 5, *[4 * WIDTH] * 3]
CUTS = {"found": "pp=2", "even": "pp=2 stages=blocks.4"}
AIM = 0.85


class Mlp(nn.Module):
    """A residual block."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Unequal(nn.Module):
    """Blocks of two widths and a large head."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Mlp(inner) for inner in INNER)
        self.leave = nn.Linear(WIDTH, sum(INNER))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        done: Tensor = self.leave(x)
        return done


def take_steps(layout: str) -> Iterator[float]:
    """Take a trainer's steps on one global batch."""
    trainer = paceline.Trainer(
        Unequal,
        forward=lambda model, batch: model(batch["x"]),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3, fused=True),
        layout=layout,
        example={"x": torch.zeros(2, 64, 4)},
        microbatch_size=8,
    )
    batch = {"x": torch.randn(8 * NUM_MICROBATCHES, 64, 4, generator=torch.Generator().manual_seed(0))}
    while True:
        yield trainer.step(batch).loss


def run_rank(num_blocks: int) -> BlockTimes:
    """Run on every rank: a step of each cut in turn."""
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        loops = {name: take_steps(layout) for name, layout in CUTS.items()}
        return alternate(world, loops, num_blocks=num_blocks, warm_up=2)


def describe(result: dict[str, Any]) -> str:
    """Return the ratios, a line each."""
    times = result["block_s"]
    ratio = Spread.of(a / b for a, b in zip(times["found"], times["even"], strict=True))
    slowest = {
        name: [max(ranks) for ranks in zip(*by_rank, strict=True)]
        for name, by_rank in result["rank_cpu_s"].items()
    }
    computed = Spread.of(a / b for a, b in zip(slowest["found"], slowest["even"], strict=True))
    shares = ", ".join(
        f"{name} {' + '.join(f'{Spread.of(each).median * 1e3:.3g}' for each in by_rank)} ms"
        for name, by_rank in result["rank_cpu_s"].items()
    )
    steps = ", ".join(f"{name} {Spread.of(times[name]).median * 1e3:.3g} ms" for name in CUTS)
    return (
        f"found cut / even cut: {ratio:.3f}, aim {AIM}; {steps}; n = {ratio.num_values}; load before "
        f"{result['load_before']:.1f}, after {result['load_after']:.1f}\n"
        f"CPU of the slowest rank, found cut / even cut: {computed:.3f}; by rank: {shares}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40, help="steps of each cut (default 40)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the raw times")
    args = parser.parse_args()
    conditions = Conditions()
    found = launch(run_rank, nproc=NUM_RANKS, args=(args.blocks,), hang_after_s=None)
    by_rank = {name: [times.block_cpu_s[name] for times in found] for name in CUTS}
    result = {**conditions.read(), **join_ranks(found), "rank_cpu_s": by_rank}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "cuts.json").write_text(json.dumps(result) + "\n")
    print(describe(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
