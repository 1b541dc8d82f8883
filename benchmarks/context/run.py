"""Step time of the Trainer under cp, against hand-written loops in the same ranks and one process.

    python benchmarks/context/run.py                            # all of README.md
    python benchmarks/context/run.py --by heads --pairs 10      # a quick look
    python benchmarks/context/run.py --tables                   # of what was measured before

Keeps the raw times in results/*.json and their summary in results.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "layouts"))  # the Trainer's loop, and what both train

import torch.distributed as dist
from alternate import BlockTimes, Conditions, alternate, join_ranks
from by_hand import HANDS
from loops import Job, ours

import paceline
from paceline.bench.spread import Spread
from paceline.launching.local import launch

HERE = Path(__file__).parent
# What the upper end of the interval must stay under; and the CPU seconds of all ranks, over one process.
LIMIT, CPU_LIMIT = 1.05, 1.15
MODEL = {"layers": 6, "hidden": 512, "heads": 8}
SEQ_LEN, NUM_SAMPLES, NUM_RANKS = 1024, 1, 2
WAYS = ("heads", "gather")


def run_ranks(by: str, num_pairs: int) -> tuple[BlockTimes, dict[str, float], int]:
    """Run on every rank: both loops, each with its model, optimizer and loader."""
    warnings.simplefilter("ignore")  # of torch, about itself
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        job = _describe_job(f"cp={world.world_size} cp_by={by}")
        loops = {"paceline": ours(job), "by_hand": HANDS[by](job)}
        first = alternate(world, loops, num_blocks=0, warm_up=2)
        losses = {name: float(loss) for name, loss in first.last.items()}
        found: list[Any] = [None] * world.world_size
        dist.all_gather_object(found, losses)  # by hand it is that of this rank's positions
        losses = {name: sum(each[name] for each in found) / len(found) for name in loops}
        blocks = alternate(world, loops, num_blocks=num_pairs)
        num_parameters = sum(p.numel() for p in job.build_model().parameters())
    return replace(blocks, last={}), losses, num_parameters


def run_alone(num_steps: int) -> BlockTimes:
    """Run in one process: the Trainer without a layout."""
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        blocks = alternate(world, {"one process": ours(_describe_job(""))}, num_blocks=num_steps, warm_up=2)
    return replace(blocks, last={})


def _describe_job(layout: str) -> Job:
    return Job(dict(MODEL), layout, SEQ_LEN, NUM_SAMPLES, 1)


def measure(by: str, num_pairs: int) -> dict[str, Any]:
    """Measure one way to attend."""
    conditions = Conditions()
    alone = launch(run_alone, nproc=1, args=(max(2, num_pairs // 4),))
    found = launch(run_ranks, nproc=NUM_RANKS, args=(by, num_pairs))
    losses = found[0][1]
    if abs(losses["paceline"] - losses["by_hand"]) > 1e-4:
        raise SystemExit(f"the loops do not train alike: {losses}")
    return {
        "by": by,
        "num_parameters": found[0][2],
        "seq_len": SEQ_LEN,
        **conditions.read("gloo", "1 thread per rank"),
        "losses": losses,
        **join_ranks([blocks for blocks, _, _ in found]),
        "alone_cpu_s": join_ranks(alone)["block_cpu_s"]["one process"],
    }


def spread_ratio(result: dict[str, Any], key: str) -> Spread:
    """Return the ratio of each step of the Trainer to the neighbouring one by hand."""
    times = result[key]
    return Spread.of(a / b for a, b in zip(times["paceline"], times["by_hand"], strict=True))


def over_one_process(result: dict[str, Any], name: str) -> float:
    """Return the CPU seconds of all ranks of a loop over those of one process, by their medians."""
    own, alone = Spread.of(result["block_cpu_s"][name]), Spread.of(result["alone_cpu_s"])
    return own.median / alone.median


def describe(results: list[dict[str, Any]]) -> str:
    """Return a table in Markdown."""
    lines = [
        "| cp_by | paceline, ms per step | by hand, ms | ratio | interval of the median | n | ratio of CPU "
        "time | CPU over one process: paceline, by hand | load |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        ratio, cpu = spread_ratio(result, "block_s"), spread_ratio(result, "block_cpu_s")
        own, hand = (
            Spread.of(1e3 * block for block in result["block_s"][name]) for name in ("paceline", "by_hand")
        )
        over = ", ".join(f"{over_one_process(result, name):.3f}" for name in ("paceline", "by_hand"))
        lines.append(
            f"| {result['by']} | {own.median:.4g} | {hand.median:.4g} | {ratio.median:.3f} | "
            f"{ratio.low:.3f} to {ratio.high:.3f} ({ratio.confidence:.0%}) | {ratio.num_values} | "
            f"{cpu.median:.3f} ({cpu.low:.3f} to {cpu.high:.3f}) | {over} | "
            f"{result['load_before']:.1f} to {result['load_after']:.1f} |"
        )
    return "\n".join(lines)


def write_summary(results: list[dict[str, Any]], path: Path) -> str:
    """Write the table and on what it was measured."""
    machines = sorted({result["machine"] for result in results})
    text = "\n".join([*machines, "", describe(results), ""])
    path.write_text(text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--by", choices=WAYS, action="append", help="default: all")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps")
    parser.add_argument("--tables", action="store_true", help="print the table of what was measured before")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results/ and results.txt")
    args = parser.parse_args()
    folder = args.out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    missed = []
    for by in () if args.tables else args.by or WAYS:
        result = measure(by, args.pairs)
        (folder / f"{by}.json").write_text(json.dumps(result) + "\n")
        ratio, over = spread_ratio(result, "block_s"), over_one_process(result, "paceline")
        if ratio.high > LIMIT:
            missed.append(f"{by}: upper end {ratio.high:.3f}, wanted {LIMIT}")
        if over > CPU_LIMIT:
            missed.append(f"{by}: {over:.3f} of the CPU time of one process, wanted {CPU_LIMIT}")
    results = [
        json.loads((folder / f"{by}.json").read_text()) for by in WAYS if (folder / f"{by}.json").exists()
    ]
    print(write_summary(results, args.out / "results.txt"))
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
