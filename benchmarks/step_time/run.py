"""Step time of Paceline against a hand-written DDP loop and its peers, on the same ranks in turn.

    python benchmarks/step_time/run.py                                        # all of README.md
    python benchmarks/step_time/run.py --size 0.13M --blocks 20 --only hand   # a quick look

Prints a table per comparison and keeps the raw times in results/*.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
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


@dataclass(frozen=True)
class Size:
    """A model and how it is timed.

    Attributes:
        model: keys of the recipe's [model].
        microbatch_size: samples per forward.
        block_steps: steps of a block.
        num_blocks: blocks of each variant.
        upper_limit: what the upper end of the interval must stay under, against the hand-written loop.
    """

    model: dict[str, int]
    microbatch_size: int
    block_steps: int
    num_blocks: int
    upper_limit: float


# 96 tokens: a global batch whose number of targets is no power of two, for which Paceline would skip a pass.
SEQ_LEN = 96
SIZES = {
    "0.13M": Size({"layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 208}, 4, 5, 400, 1.10),
    "20M": Size({"layers": 6, "hidden": 512, "heads": 8, "ffn_hidden": 1472}, 4, 1, 200, 1.02),
}
# DeepSpeed is timed apart: it changes settings of the process that it is imported into.
GROUPS = {
    "hand": ["paceline", "hand_written"],
    "loops": ["paceline", "loop_explicit", "loop_plain", "hand_written"],
    "peers": ["paceline", "hand_written", "accelerate", "fabric"],
    "deepspeed": ["paceline", "hand_written", "deepspeed_zero0", "deepspeed_zero1"],
}


def build_recipe(size: Size, num_microbatches: int) -> Recipe:
    """Return the training that all variants do."""
    return parse_recipe(
        {
            "model": {"kind": "gpt", **size.model},
            "data": {"kind": "text", "files": ["python-stdlib"], "seq_len": SEQ_LEN},
            "train": {
                "steps": 100_000,
                "global_batch_size": NUM_RANKS * size.microbatch_size * num_microbatches,
                "microbatch_size": size.microbatch_size,
                "threads_per_rank": 1,
                "device": "cpu",
                "clip_norm": 1.0,
            },
            "optimizer": {"kind": "adamw", "lr": 3e-4, "warmup_steps": 100},
        }
    )


@dataclass(frozen=True)
class Times:
    """The measurements of one rank.

    Attributes:
        blocks: the times of all variants.
        losses: per variant, the loss of the last step: all of them have learned about the same.
        num_parameters: of the model.
    """

    blocks: BlockTimes
    losses: dict[str, float]
    num_parameters: int


def run_rank(
    recipe: Recipe, names: list[str], folder: Path, num_blocks: int, block_steps: int, warm_up: int
) -> Times:
    """Run on every rank: all variants, each with its own model, optimizer and loader.

    Paceline's steps run as its recipes do by default, with deterministic kernels only; the others with the
    defaults of torch.
    """
    warnings.simplefilter("ignore", FutureWarning)  # peers call what torch 2.13 has renamed
    train = recipe.train

    def choose_kernels(name: str) -> None:
        is_ours = name.startswith(("paceline", "loop"))
        torch.use_deterministic_algorithms(is_ours and train.deterministic)

    with paceline.start(
        device=train.device,
        timeout_s=train.timeout_s,
        seed=train.seed,
        threads_per_rank=train.threads_per_rank,
        deterministic=train.deterministic,
    ) as world:
        job = Job(recipe, build_data(recipe), world, folder)
        loops = {name: VARIANTS[name](job) for name in names}
        blocks = alternate(
            world,
            loops,
            num_blocks=num_blocks,
            block_steps=block_steps,
            warm_up=warm_up,
            before=choose_kernels,
        )
        losses = {name: float(loss) for name, loss in blocks.last.items()}
        num_parameters = sum(p.numel() for p in job.build_model().parameters())
    return Times(replace(blocks, last={}), losses, num_parameters)


def measure(size_name: str, group: str, num_microbatches: int, num_blocks: int) -> dict[str, Any]:
    """One comparison: all variants of a group on the same ranks."""
    size = SIZES[size_name]
    recipe = build_recipe(size, num_microbatches)
    prepare_data(recipe)
    names = GROUPS[group]
    conditions = Conditions()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (recipe, names, Path(folder), num_blocks, size.block_steps, 3 * size.block_steps)
        found = launch(run_rank, nproc=NUM_RANKS, args=arguments)
    return {
        "size": size_name,
        "group": group,
        "num_parameters": found[0].num_parameters,
        "num_ranks": NUM_RANKS,
        "threads_per_rank": 1,
        "seq_len": SEQ_LEN,
        "microbatch_size": size.microbatch_size,
        "microbatches_per_rank": num_microbatches,
        "block_steps": size.block_steps,
        **conditions.read(),
        "versions": find_versions(),
        "losses": found[0].losses,
        **join_ranks([times.blocks for times in found]),
    }


def summarise(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Per variant: step time, and the ratio to the hand-written loop block by block."""
    block_s, steps = result["block_s"], result["block_steps"]
    base = block_s["hand_written"]
    return [
        {
            "variant": name,
            "step_s": Spread.of(block / steps for block in times),
            "ratio": Spread.of(a / b for a, b in zip(times, base, strict=True)),
        }
        for name, times in block_s.items()
    ]


def describe(result: dict[str, Any]) -> str:
    """Return a table in Markdown."""
    lines = [
        f"{result['size']} ({result['num_parameters']:,} parameters), {result['num_ranks']} ranks, "
        f"{result['microbatches_per_rank']} microbatch(es) of {result['microbatch_size']} x "
        f"{result['seq_len']} tokens per rank and step; blocks of {result['block_steps']} step(s); "
        f"load before {result['load_before']:.2f}, after {result['load_after']:.2f}",
        "",
        "| | ms per step | ratio to hand-written | interval of the median | n |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in summarise(result):
        ratio = row["ratio"]
        lines.append(
            f"| {row['variant']} | {row['step_s'].median * 1e3:.4g} | {ratio.median:.3f} | "
            f"{ratio.low:.3f} to {ratio.high:.3f} ({ratio.confidence:.0%}) | {ratio.num_values} |"
        )
    return "\n".join(lines)


def find_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are compared."""
    found = {"python": platform.python_version()}
    for name in ("torch", "paceline", "accelerate", "lightning", "deepspeed"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=SIZES, action="append", help="default: all")
    parser.add_argument("--only", choices=GROUPS, action="append", help="default: all")
    parser.add_argument("--microbatches", type=int, action="append", help="per rank; default: 1 and 2")
    parser.add_argument("--blocks", type=int, help="blocks of each variant; default: what README.md has")
    parser.add_argument("--tables", action="store_true", help="print the tables of what was measured before")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the raw times")
    args = parser.parse_args()
    if args.tables:
        for path in sorted(args.out.glob("*.json")):
            print(f"### {path.name}\n\n{describe(json.loads(path.read_text()))}\n")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    missed = []
    for size_name in args.size or SIZES:
        for group in args.only or GROUPS:
            for num_microbatches in args.microbatches or (1, 2):
                size = SIZES[size_name]
                # Peers are there to compare with, not to be held to a limit: fewer blocks do.
                num_blocks = args.blocks or size.num_blocks // (1 if group == "hand" else 4)
                result = measure(size_name, group, num_microbatches, num_blocks)
                name = f"{size_name}-{group}-{num_microbatches}.json"
                (args.out / name).write_text(json.dumps(result) + "\n")
                print(f"### {name}\n\n{describe(result)}\n", flush=True)
                ratio = summarise(result)[0]["ratio"]
                if group == "hand" and ratio.high > size.upper_limit:
                    missed.append(f"{name}: upper end {ratio.high:.3f}, wanted {size.upper_limit}")
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
