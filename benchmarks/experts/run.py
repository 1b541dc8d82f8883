"""Step time and CPU time of ep=2 against a mixture with all_to_all by hand, and against replicated tokens.

    python benchmarks/experts/run.py                                   # all of README.md
    python benchmarks/experts/run.py --reduction exact --blocks 6      # a quick look

Prints a table per reduction and keeps the raw times in results/*.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from alternate import BlockTimes, Conditions, alternate, join_ranks
from loops import VARIANTS, Job

import paceline
from paceline.bench.spread import Spread
from paceline.data import build_data, prepare_data
from paceline.launching.local import launch
from paceline.recipe import Recipe, parse_recipe

HERE = Path(__file__).parent
NUM_RANKS = 2
NUM_WARM_UP = 1


def build_recipe(reduction: str) -> Recipe:
    """20M parameters, 4 microbatches of 4 samples of 128 tokens."""
    return parse_recipe(
        {
            "model": {
                "kind": "moe",
                "layers": 6,
                "hidden": 256,
                "heads": 8,
                "experts": 8,
                "expert_hidden": 512,
            },
            "data": {"kind": "text", "files": ["python-stdlib"], "seq_len": 128},
            "train": {
                "steps": 100_000,
                "global_batch_size": 16,
                "microbatch_size": 4,
                "threads_per_rank": 1,
                "device": "cpu",
                "clip_norm": 1.0,
                "reduction": reduction,
            },
            "layout": {"dp_replicate": NUM_RANKS, "ep": NUM_RANKS},
            "optimizer": {"kind": "adamw", "lr": 3e-4},
        }
    )


@dataclass(frozen=True)
class Times:
    """The measurements of one rank: the times of each variant's steps, with the last loss."""

    blocks: BlockTimes
    num_parameters: int


def run_rank(recipe: Recipe, num_blocks: int) -> Times:
    """Run on every rank: a step of each variant in turn."""
    train = recipe.train

    def choose_kernels(name: str) -> None:
        torch.use_deterministic_algorithms(name == "paceline" and train.deterministic)

    with paceline.start(
        device="cpu", seed=train.seed, threads_per_rank=1, deterministic=train.deterministic
    ) as world:
        job = Job(recipe, build_data(recipe), world)
        num_parameters = sum(p.numel() for p in job.build_model().parameters())
        loops = {name: build(job) for name, build in VARIANTS.items()}
        blocks = alternate(world, loops, num_blocks=num_blocks, warm_up=NUM_WARM_UP, before=choose_kernels)
    return Times(blocks, num_parameters)


def measure(num_blocks: int, reduction: str) -> dict[str, Any]:
    """Measure one comparison."""
    recipe = build_recipe(reduction)
    prepare_data(recipe)
    conditions = Conditions()
    found = launch(run_rank, nproc=NUM_RANKS, args=(recipe, num_blocks), hang_after_s=None)
    return {
        "reduction": reduction,
        "num_parameters": found[0].num_parameters,
        **conditions.read(),
        "torch": torch.__version__,
        "losses": found[0].blocks.last,
        **join_ranks([times.blocks for times in found]),
    }


def describe(result: dict[str, Any]) -> str:
    """Return a table in Markdown."""
    block_s, cpu_s = result["block_s"], result["block_cpu_s"]
    lines = [
        f"Reduction {result['reduction']}, {result['num_parameters']:,} parameters, {NUM_RANKS} ranks; load "
        f"before {result['load_before']:.1f}, after {result['load_after']:.1f}; "
        f"n = {len(block_s['paceline'])}",
        "",
        "| | s per step | time / by_hand's | CPU s over ranks | CPU / by_hand's | CPU / one process's |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in VARIANTS:
        cells = [
            Spread.of(a / b for a, b in zip(times[name], times[other], strict=True))
            for times, other in ((block_s, "by_hand"), (cpu_s, "by_hand"), (cpu_s, "one_process"))
        ]
        lines.append(
            f"| {name} | {Spread.of(block_s[name]).median:.3g} | {cells[0]:.3f} | "
            f"{Spread.of(cpu_s[name]).median:.3g} | {cells[1]:.3f} | {cells[2]:.3f} |"
        )
    ratio = Spread.of(a / b for a, b in zip(block_s["paceline"], block_s["replicated"], strict=True))
    cpu = Spread.of(a / b for a, b in zip(cpu_s["paceline"], cpu_s["replicated"], strict=True))
    return "\n".join([*lines, "", f"paceline / replicated: time {ratio:.3f}, CPU {cpu:.3f}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--reduction", choices=("exact", "fast"), action="append", help="default: both")
    parser.add_argument("--blocks", type=int, default=40, help="steps of each variant (default 40)")
    parser.add_argument("--tables", action="store_true", help="print the tables of what was measured before")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the raw times")
    args = parser.parse_args()
    if args.tables:
        for path in sorted(args.out.glob("*.json")):
            print(f"{describe(json.loads(path.read_text()))}\n")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for reduction in args.reduction or ("exact", "fast"):
        result = measure(args.blocks, reduction)
        (args.out / f"{reduction}.json").write_text(json.dumps(result) + "\n")
        print(f"{describe(result)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
