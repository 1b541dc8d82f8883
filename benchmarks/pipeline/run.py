"""Step time and CPU time of Paceline's pipelines against torch.distributed.pipelining, on the same ranks.

    python benchmarks/pipeline/run.py                                  # all of README.md
    python benchmarks/pipeline/run.py --schedule 1f1b --blocks 6       # a quick look
    python benchmarks/pipeline/run.py --first 5                        # first steps, in fresh processes

Prints a table per schedule and keeps the raw times in results/*.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from alternate import BlockTimes, Conditions, alternate, join_ranks
from loops import SCHEDULES, VARIANTS, Job

import paceline
from paceline.bench.spread import Spread
from paceline.data import build_data, prepare_data
from paceline.launching.local import launch
from paceline.recipe import Recipe, parse_recipe

HERE = Path(__file__).parent
NUM_RANKS = 2
# The layers that stages begin with: one stage per rank, or two.
STARTS = {1: (0, 3), 2: (0, 2, 3, 5)}


def list_starts(schedule: str) -> tuple[int, ...]:
    """Return the first layer of each stage."""
    return STARTS[2 if schedule in ("interleaved", "zbv") else 1]


def build_recipe(schedule: str, reduction: str) -> Recipe:
    """20M parameters, 8 microbatches of 2 samples of 96 tokens."""
    starts = list_starts(schedule)
    return parse_recipe(
        {
            "model": {
                "kind": "gpt",
                "layers": 6,
                "hidden": 512,
                "heads": 8,
                "ffn_hidden": 1472,
                "tie_embeddings": False,
            },
            "data": {"kind": "text", "files": ["python-stdlib"], "seq_len": 96},
            "train": {
                "steps": 100_000,
                "global_batch_size": 16,
                "microbatch_size": 2,
                "threads_per_rank": 1,
                "device": "cpu",
                "clip_norm": 1.0,
                "reduction": reduction,
            },
            "layout": {
                "dp_replicate": 1,
                "pp": NUM_RANKS,
                "schedule": schedule,
                "chunks": len(starts) // NUM_RANKS,
                "stages": "+".join(f"layers.{start}" for start in starts[1:]),
            },
            "optimizer": {"kind": "adamw", "lr": 3e-4},
        }
    )


@dataclass(frozen=True)
class Times:
    """The measurements of one rank.

    Attributes:
        first_s: by variant, the seconds of its first step.
        blocks: the times of each variant's steps, with the last loss.
        num_parameters: of the model.
    """

    first_s: dict[str, float]
    blocks: BlockTimes
    num_parameters: int


def run_rank(recipe: Recipe, schedule: str, num_blocks: int) -> Times:
    """Run on every rank: a step of each variant in turn."""
    warnings.simplefilter("ignore")  # torch's pipelining warns of its own choices
    train = recipe.train

    def choose_kernels(name: str) -> None:
        torch.use_deterministic_algorithms(name == "paceline" and train.deterministic)

    with paceline.start(
        device="cpu", seed=train.seed, threads_per_rank=1, deterministic=train.deterministic
    ) as world:
        job = Job(recipe, build_data(recipe), world, schedule, list_starts(schedule))
        num_parameters = sum(p.numel() for p in job.build_model().parameters())
        loops = {name: build(job) for name, build in VARIANTS.items()}
        first_s = {}
        for name, loop in loops.items():
            choose_kernels(name)
            next(loop)
            world.barrier()
            start_s = time.perf_counter()
            next(loop)
            first_s[name] = time.perf_counter() - start_s
        blocks = alternate(world, loops, num_blocks=num_blocks, before=choose_kernels)
    return Times(first_s, blocks, num_parameters)


def measure(schedule: str, num_blocks: int, reduction: str) -> dict[str, Any]:
    """Measure one comparison."""
    recipe = build_recipe(schedule, reduction)
    prepare_data(recipe)
    conditions = Conditions()
    found = launch(run_rank, nproc=NUM_RANKS, args=(recipe, schedule, num_blocks), hang_after_s=None)
    return {
        "schedule": schedule,
        "reduction": reduction,
        "num_parameters": found[0].num_parameters,
        "num_microbatches": 8,
        **conditions.read(),
        "torch": torch.__version__,
        "first_s": {name: max(times.first_s[name] for times in found) for name in VARIANTS},
        "losses": {
            n: next((t.blocks.last[n] for t in found if t.blocks.last.get(n) is not None), None)
            for n in VARIANTS
        },
        **join_ranks([times.blocks for times in found]),
    }


def describe_first(schedule: str, results: list[dict[str, Any]]) -> str:
    """Return a line about first steps, each in fresh processes."""
    ratios = Spread.of(r["first_s"]["paceline"] / r["first_s"]["torch_pipelining"] for r in results)
    return f"{schedule}, first step / torch's: {ratios:.2f}; n = {len(results)}"


def describe(result: dict[str, Any]) -> str:
    """Return a table in Markdown."""
    block_s, cpu_s = result["block_s"], result["block_cpu_s"]
    lines = [
        f"{result['schedule']}, {result['num_parameters']:,} parameters, {NUM_RANKS} ranks, "
        f"{result['num_microbatches']} microbatches, reduction {result['reduction']}; load before "
        f"{result['load_before']:.1f}, after {result['load_after']:.1f}; n = {len(block_s['paceline'])}",
        "",
        "| | s per step | time / torch's | CPU s over ranks | CPU / one process's |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in VARIANTS:
        times = Spread.of(a / b for a, b in zip(block_s[name], block_s["torch_pipelining"], strict=True))
        cpu = Spread.of(a / b for a, b in zip(cpu_s[name], cpu_s["one_process"], strict=True))
        lines.append(
            f"| {name} | {Spread.of(block_s[name]).median:.3g} | {times:.3f} | "
            f"{Spread.of(cpu_s[name]).median:.3g} | {cpu:.3f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--schedule", choices=SCHEDULES, action="append", help="default: all")
    parser.add_argument("--blocks", type=int, default=40, help="steps of each variant (default 40)")
    parser.add_argument("--first", type=int, help="measure first steps alone, in so many fresh processes")
    parser.add_argument("--reduction", choices=("exact", "fast"), default="exact")
    parser.add_argument("--tables", action="store_true", help="print the tables of what was measured before")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the raw times")
    args = parser.parse_args()
    if args.tables:
        for path in sorted(args.out.glob("*-*.json")):  # cuts.json is that of cuts.py
            result = json.loads(path.read_text())
            if isinstance(result, list):
                print(f"{describe_first(path.stem.split('-')[1], result)}\n")
            else:
                print(f"{describe(result)}\n")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for schedule in args.schedule or SCHEDULES:
        if args.first:
            results = [measure(schedule, 0, args.reduction) for _ in range(args.first)]
            first = [{"first_s": result["first_s"]} for result in results]
            (args.out / f"first-{schedule}-{args.reduction}.json").write_text(json.dumps(first) + "\n")
            print(describe_first(schedule, results), flush=True)
            continue
        result = measure(schedule, args.blocks, args.reduction)
        (args.out / f"{schedule}-{args.reduction}.json").write_text(json.dumps(result) + "\n")
        print(f"{describe(result)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
