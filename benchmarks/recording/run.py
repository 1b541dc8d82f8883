"""Measures what recording costs: blocks of steps with and without it, in turn, in one job of two ranks.

    python benchmarks/recording/run.py               # all of README.md
    python benchmarks/recording/run.py --pairs 50    # a quick run
    python benchmarks/recording/run.py --tables      # the last measurement

Keeps the raw times in results.json and their summary in results.txt. Exit code 1 if the claim fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from paceline.bench.spread import Spread

sys.path.insert(0, str(Path(__file__).parents[1]))
from machine import describe_machine

HERE = Path(__file__).parent
TRAIN = HERE.parent / "watching" / "train.py"
NUM_RANKS = 2
NUM_PAIRS = 300
WARM_UP, NUM_STEPS = 10, 20
BLOCK = WARM_UP + NUM_STEPS
LIMIT = 1.02


def measure(num_pairs: int) -> dict[str, Any]:
    """Run one job whose every other block is recorded, and return the times of all blocks.

    A recording starts with the last step of a block, lets one step pass, and ends with the next block's first
    forward. Starting and writing lie in untimed steps.
    """
    with tempfile.TemporaryDirectory() as name:
        gate = Path(name)
        for pipe in (*(gate / f"go-{rank}" for rank in range(NUM_RANKS)), gate / "done"):
            os.mkfifo(pipe)
        num_blocks = 2 * num_pairs + 2
        command = [str(Path(sys.executable).with_name("paceline")), "profile", "--out", str(gate / "traces")]
        command += ["--nproc-per-node", str(NUM_RANKS), "--from", str(BLOCK + 2), "--steps", str(BLOCK - 1)]
        command += ["--every", str(2 * BLOCK), "--json", str(TRAIN)]
        command += ["--blocks", str(num_blocks), "--steps", str(NUM_STEPS), "--warm-up", str(WARM_UP)]
        output = gate / "output"
        with output.open("w") as file:
            job = subprocess.Popen(
                [*command, "--gate", name],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=name,
            )
        blocks = []
        try:
            for _ in range(num_blocks):
                for rank in range(NUM_RANKS):
                    (gate / f"go-{rank}").write_text("go")
                blocks.append(json.loads((gate / "done").read_text()))
            if job.wait(300) != 0:
                raise SystemExit(output.read_text())
        finally:
            job.kill()
        tables = [json.loads(path.read_bytes())["paceline"] for path in (gate / "traces").glob("*/*.json")]
    # A job records in its second block, its fourth and so on; the last block closes the last pair.
    expected = num_pairs + 1
    if len(tables) != NUM_RANKS * expected or any(len(table["steps"]) != BLOCK - 1 for table in tables):
        raise SystemExit(f"{len(tables)} files instead of {NUM_RANKS * expected}")
    return {
        "num_parameters": blocks[0]["num_parameters"],
        "took_s": [block["took_s"] for block in blocks],
        "computed_s": [block["computed_s"] for block in blocks],
        "printed": [table["slowdown"] for table in tables if table["slowdown"] is not None],
    }


def spread_ratio(times: list[float]) -> Spread:
    """Return the ratio of each recorded block to the mean of the two around it."""
    recorded = range(1, len(times) - 1, 2)
    return Spread.of(times[i] / ((times[i - 1] + times[i + 1]) / 2) for i in recorded)


def describe(result: dict[str, Any]) -> str:
    """Return what was measured on what, and a table in Markdown."""
    lines = [
        result["machine"],
        f"{result['depths']['light']['num_parameters']:,} parameters, {NUM_RANKS} ranks, {NUM_STEPS} timed "
        f"steps per block; {result['started']}, load before {result['load_before']:.2f}, "
        f"after {result['load_after']:.2f}",
        "",
        "| depth | | without, ms | ratio | interval of the median | pairs | as printed by the report |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for depth, found in result["depths"].items():
        for key, words in (("took_s", "time of a step"), ("computed_s", "CPU time of a step, all ranks")):
            ratio = spread_ratio(found[key])
            without = 1e3 * median(found[key][0::2]) / NUM_STEPS
            printed = f"{median(found['printed']):.3f}" if key == "took_s" else ""
            lines.append(
                f"| {depth} | {words} | {without:.4g} | {ratio.median:.4f} | {ratio.low:.4f} to "
                f"{ratio.high:.4f} ({ratio.confidence:.0%}) | {ratio.num_values} | {printed} |"
            )
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--pairs",
        type=int,
        default=NUM_PAIRS,
        help="of blocks (default 300)",
    )
    parser.add_argument("--tables", action="store_true", help="print the table of what was measured before")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.json and results.txt")
    args = parser.parse_args()
    path = args.out / "results.json"
    if not args.tables:
        args.out.mkdir(parents=True, exist_ok=True)
        result = {
            "machine": f"{describe_machine()}, gloo, 1 thread per rank",
            "started": time.strftime("%Y-%m-%d %H:%M"),
            "load_before": os.getloadavg()[0],
            "depths": {"light": measure(args.pairs)},
        }
        path.write_text(json.dumps({**result, "load_after": os.getloadavg()[0]}) + "\n")
    result = json.loads(path.read_text())
    text = describe(result)
    (args.out / "results.txt").write_text(text)
    print(text)
    high = spread_ratio(result["depths"]["light"]["took_s"]).high
    if high > LIMIT:
        print(f"missed: upper end {high:.4f}, wanted {LIMIT}")
    return 1 if high > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
