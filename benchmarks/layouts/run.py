"""Step time of the Trainer under shard and tensor layouts, against hand-written loops, in the same ranks.

    python benchmarks/layouts/run.py                                      # all of README.md
    python benchmarks/layouts/run.py --size 0.8M --layout tp=2 --blocks 50  # a quick look
    python benchmarks/layouts/run.py --tables                             # of what was measured before

Keeps the raw times in results/*.json and their summary in results.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist
from alternate import BlockTimes, Conditions, alternate, join_ranks
from loops import LOOPS, Job

import paceline
from paceline.bench.spread import Spread
from paceline.launching.local import launch

HERE = Path(__file__).parent
# What the upper end of the interval must stay under.
LIMIT = 1.05
SEQ_LEN = 96
MICROBATCH_SIZE = 4


@dataclass(frozen=True)
class Size:
    """A model and how it is timed.

    Attributes:
        model: keys of the recipe's [model].
        block_steps: steps of a block.
        num_blocks: blocks of each loop.
    """

    model: dict[str, int]
    block_steps: int
    num_blocks: int


SIZES = {
    "0.8M": Size({"layers": 4, "hidden": 128, "heads": 4}, 2, 200),
    "19M": Size({"layers": 6, "hidden": 512, "heads": 8}, 1, 60),
}
LAYOUTS = ["dp_shard=2 zero=3", "dp_shard=2 zero=2", "tp=2", "dp_shard=2 tp=2"]


@dataclass(frozen=True)
class Times:
    """The measurements of one rank.

    Attributes:
        blocks: the times of both loops.
        losses: per loop, the loss after the first steps: the mean over this global batch.
        num_parameters: of the whole model.
    """

    blocks: BlockTimes
    losses: dict[str, float]
    num_parameters: int


def run_rank(job: Job, num_blocks: int, block_steps: int, warm_up: int) -> Times:
    """Run on every rank: both loops, each with its model, optimizer and loader."""
    warnings.simplefilter("ignore")  # of torch, about itself
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        loops = {name: loop(job) for name, loop in LOOPS.items()}
        first = alternate(world, loops, num_blocks=0, warm_up=warm_up)
        losses = {name: float(loss) for name, loss in first.last.items()}
        # By hand it is the loss of this rank's last microbatch; with one microbatch, their mean is the loss.
        found: list[Any] = [None] * world.world_size
        dist.all_gather_object(found, losses)
        losses = {name: sum(each[name] for each in found) / len(found) for name in loops}
        blocks = alternate(world, loops, num_blocks=num_blocks, block_steps=block_steps)
        num_parameters = sum(p.numel() for p in job.build_model().parameters())
    return Times(replace(blocks, last={}), losses, num_parameters)


def measure(size_name: str, layout: str, num_microbatches: int, num_blocks: int) -> dict[str, Any]:
    """Measure one comparison."""
    size = SIZES[size_name]
    job = Job(size.model, layout, SEQ_LEN, MICROBATCH_SIZE, num_microbatches)
    degrees = job.degrees
    conditions = Conditions()
    found = launch(
        run_rank,
        nproc=degrees.dp_shard * degrees.tp,
        args=(job, num_blocks, size.block_steps, 3),
    )
    losses = found[0].losses
    if num_microbatches == 1 and abs(losses["paceline"] - losses["by_hand"]) > 1e-4:
        raise SystemExit(f"the loops don't train alike: {losses}")
    return {
        "size": size_name,
        "layout": layout,
        "num_parameters": found[0].num_parameters,
        "seq_len": SEQ_LEN,
        "microbatch_size": MICROBATCH_SIZE,
        "microbatches_per_rank": num_microbatches,
        "block_steps": size.block_steps,
        **conditions.read("gloo", "1 thread per rank"),
        "losses": losses,
        **join_ranks([times.blocks for times in found]),
    }


def spread_ratio(result: dict[str, Any], key: str = "block_s") -> Spread:
    """Of a block of the Trainer to the neighbouring one by hand; `block_cpu_s`: of the time that all ranks
    computed, which is steadier where the machine is shared."""
    times = result[key]
    return Spread.of(a / b for a, b in zip(times["paceline"], times["by_hand"], strict=True))


def describe(results: list[dict[str, Any]]) -> str:
    """Return a table in Markdown."""
    lines = [
        "| parameters | layout | microbatches | paceline, ms per step | by hand, ms | ratio | "
        "interval of the median | n | ratio of CPU time | load |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        ratio, steps = spread_ratio(result), result["block_steps"]
        own, hand = (
            Spread.of(1e3 * block / steps for block in result["block_s"][name])
            for name in ("paceline", "by_hand")
        )
        lines.append(
            f"| {result['num_parameters']:,} | {result['layout']} | {result['microbatches_per_rank']} | "
            f"{own:.4g} | {hand:.4g} | {ratio.median:.3f} | {ratio.low:.3f} to {ratio.high:.3f} "
            f"({ratio.confidence:.0%}) | {ratio.num_values} | {spread_ratio(result, 'block_cpu_s'):.3f} | "
            f"{result['load_before']:.1f} to {result['load_after']:.1f} |"
        )
    return "\n".join(lines)


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return earlier measurements, by size and layout."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    order = list(SIZES)
    return sorted(
        results,
        key=lambda r: (order.index(r["size"]), LAYOUTS.index(r["layout"]), r["microbatches_per_rank"]),
    )


def write_summary(results: list[dict[str, Any]], path: Path) -> str:
    """Return the table and on what it was measured."""
    machines = sorted({result["machine"] for result in results})
    text = "\n".join([*machines, "", describe(results), ""])
    path.write_text(text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=SIZES, action="append", help="default: all")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="default: all")
    parser.add_argument("--microbatches", type=int, action="append", help="per rank; default: 1 and 2")
    parser.add_argument("--blocks", type=int, help="blocks of each loop; default: what README.md has")
    parser.add_argument("--tables", action="store_true", help="print the table of what was measured before")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results/ and results.txt")
    args = parser.parse_args()
    folder = args.out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    missed = []
    if not args.tables:
        for size_name in args.size or SIZES:
            for layout in args.layout or LAYOUTS:
                for num_microbatches in args.microbatches or (1, 2):
                    num_blocks = args.blocks or SIZES[size_name].num_blocks
                    result = measure(size_name, layout, num_microbatches, num_blocks)
                    name = f"{size_name}-{layout.replace(' ', '-')}-{num_microbatches}"
                    (folder / f"{name}.json").write_text(json.dumps(result) + "\n")
                    ratio = spread_ratio(result)
                    cpu = spread_ratio(result, "block_cpu_s")
                    print(f"{name}: {ratio:.3f}, n={ratio.num_values}, CPU {cpu:.3f}", flush=True)
                    if ratio.high > LIMIT:
                        missed.append(f"{name}: upper end {ratio.high:.3f}, wanted {LIMIT}")
    print(write_summary(read_results(folder), args.out / "results.txt"))
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
