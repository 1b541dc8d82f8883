"""What watching costs: the same training under `paceline run` with and without `--no-watch`, in turn.

    python benchmarks/watching/run.py              # all of README.md
    python benchmarks/watching/run.py --pairs 10   # a quick look
    python benchmarks/watching/run.py --tables     # of what was measured before

Keeps the raw times in results.json and their summary in results.txt. Exit code 1 where the claim fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from paceline.bench.spread import Spread
from paceline.checkpoint.identity import describe_identity

HERE = Path(__file__).parent
NUM_RANKS = 2
NUM_PAIRS = 60
NUM_STEPS = 300
# What the upper end of the interval must stay under.
LIMIT = 1.02
WAYS: dict[str, list[str]] = {"watched": [], "unwatched": ["--no-watch"]}
# One launch; ten times what it takes.
_END_S = 120.0


def train_once(way: str, num_steps: int, folder: Path) -> dict[str, Any]:
    """Launches the training; gives what it has measured of itself, and the codes of what was said.

    Raises:
        SystemExit: it has failed.
    """
    out = folder / f"{way}.json"
    paceline = str(Path(sys.executable).with_name("paceline"))
    command = [paceline, "run", "--nproc-per-node", str(NUM_RANKS), *WAYS[way], str(HERE / "train.py")]
    command += ["--steps", str(num_steps), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_END_S)
    if run.returncode:
        raise SystemExit(f"{way}: exit code {run.returncode}\n{run.stdout}{run.stderr}")
    return {**json.loads(out.read_text()), "said": re.findall(r"\[(PL\d+)\]", run.stderr)}


def measure(num_pairs: int, num_steps: int) -> dict[str, Any]:
    """Pairs of launches; every other pair in the other order.

    Raises:
        SystemExit: watching has changed the training.
    """
    started, load = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        train_once("watched", 1, Path(folder))  # reads the files once, and compiles ours
        for pair in range(num_pairs):
            for way in WAYS if pair % 2 == 0 else reversed(WAYS):
                found[way].append(train_once(way, num_steps, Path(folder)))
    losses = {one["loss"] for each in found.values() for one in each}
    if len(losses) != 1:
        raise SystemExit(f"the same training has come to several losses: {sorted(losses)}")
    return {
        "num_parameters": found["watched"][0]["num_parameters"],
        "num_ranks": NUM_RANKS,
        "steps": num_steps,
        "started": started,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "machine": describe_machine(),
        "said": [code for each in found.values() for one in each for code in one["said"]],
        "took_s": {way: [one["took_s"] for one in each] for way, each in found.items()},
        "computed_s": {way: [one["computed_s"] for one in each] for way, each in found.items()},
    }


def describe_machine() -> str:
    """The processor, the cores, the system and torch."""
    processor = describe_identity("cpu")["processor"]
    cores = len(os.sched_getaffinity(0))
    return (
        f"{processor}, {cores} cores, {platform.system()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, gloo, 1 thread per rank"
    )


def spread_ratio(result: dict[str, Any], key: str) -> Spread:
    """Of the watched launch of a pair to the other one."""
    times = result[key]
    return Spread.of(a / b for a, b in zip(times["watched"], times["unwatched"], strict=True))


def describe(result: dict[str, Any]) -> str:
    """What was measured on what, and a table in Markdown."""
    steps = result["steps"]
    lines = [
        result["machine"],
        f"{result['num_parameters']:,} parameters, {result['num_ranks']} ranks, {steps} steps per launch; "
        f"{result['started']}, load before {result['load_before']:.2f}, after {result['load_after']:.2f}",
        "",
        "| | watched, ms per step | unwatched, ms | ratio | interval of the median | pairs |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for key, words in (("took_s", "time of a step"), ("computed_s", "CPU time of a step, all ranks")):
        ratio = spread_ratio(result, key)
        watched, unwatched = (Spread.of(1e3 * s / steps for s in result[key][way]).median for way in WAYS)
        lines.append(
            f"| {words} | {watched:.4g} | {unwatched:.4g} | {ratio.median:.4f} | {ratio.low:.4f} to "
            f"{ratio.high:.4f} ({ratio.confidence:.0%}) | {ratio.num_values} |"
        )
    said = Counter(result["said"])
    lines += ["", "said: " + (", ".join(f"{code} in {n} launches" for code, n in said.items()) or "nothing")]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, help="of launches (default %(default)d)")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="timed in each (default %(default)d)")
    parser.add_argument("--tables", action="store_true", help="print the table of what was measured before")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.json and results.txt")
    args = parser.parse_args()
    path = args.out / "results.json"
    if not args.tables:
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measure(args.pairs, args.steps)) + "\n")
    result = json.loads(path.read_text())
    text = describe(result)
    (args.out / "results.txt").write_text(text)
    print(text)
    high = spread_ratio(result, "took_s").high
    if high > LIMIT:
        print(f"missed: upper end {high:.4f}, wanted {LIMIT}")
    return 1 if high > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
