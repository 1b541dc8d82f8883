"""Applies what profiles advise, and tallies whether steps become shorter by what was said.

    python benchmarks/advice/run.py                     # all; writes results.json and results.txt
    python benchmarks/advice/run.py Workers Saving      # some, only printed
    python benchmarks/advice/run.py --rounds 3 Workers  # with fewer alternations
    python benchmarks/advice/run.py --tables            # the last results

For each case, `paceline profile` records a script on two ranks. The setting and what it saves are read from
`paceline profile read --json`. Then both settings run in turn in the same two processes, in blocks of steps.
A case is right if the setting is advised, with the largest saving of all, and the measured saving is within
30% of what was said. Exit code 1 if fewer than 5 are right.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch.distributed as dist

import paceline

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES
from tally import describe_start, find_median_error, report, run_benchmark, time_steps

HERE = Path(__file__).parent

LEAST_RIGHT, MOST_OFF = 5, 0.3
NUM_STEPS = 20
BLOCK_S, WARM_STEPS, MOST_STEPS = 0.5, 6, 100


def profile(name: str, folder: Path) -> dict[str, Any]:
    """Record a case and return what `paceline profile read --json` prints."""
    command = [sys.executable, "-m", "paceline", "profile"]
    script = [str(HERE / "training.py"), name, str(NUM_STEPS + 12)]
    steps = ["--steps", str(NUM_STEPS), "--from", "9"]
    recorded = subprocess.run(
        [*command, "--out", str(folder), *steps, "--nproc-per-node", "2", *script],
        capture_output=True,
        text=True,
        check=False,
    )
    if recorded.returncode:
        raise SystemExit(f"{name}: {recorded.stdout}{recorded.stderr}")
    read = subprocess.run(
        [*command, "read", str(folder), "--json"], capture_output=True, text=True, check=False
    )
    try:
        found: dict[str, Any] = json.loads(read.stdout)
    except json.JSONDecodeError:
        raise SystemExit(f"{name}: {read.stdout}{read.stderr}") from None
    return found


def measure(name: str, value: Any, rounds: int) -> list[tuple[float, float]]:
    """Return the mean step in seconds with the old and with the new setting, per round; on every rank."""
    with paceline.start(device="cpu") as world:
        kind = CASES[name]
        found = []
        jobs = [(kind(world.rank, kind.value), 1), (kind(world.rank, value), kind.samples)]
        counts = []
        for job, _ in jobs:
            time_steps(job, WARM_STEPS)
            took = time_steps(job, WARM_STEPS)
            counts.append(agree(max(10, min(MOST_STEPS, math.ceil(BLOCK_S / took)))))
        for number in range(rounds):
            means = [0.0, 0.0]
            for place in (0, 1) if number % 2 else (1, 0):
                job, samples = jobs[place]
                # Whole periods of what happens in each 50th step.
                steps = counts[place] if place == 0 or not isinstance(value, int) else max(50, counts[place])
                means[place] = time_steps(job, steps) / samples
            found.append((means[0], means[1]))
        return found


def agree(number: int) -> int:
    numbers: list[Any] = [None, None]
    dist.all_gather_object(numbers, number)
    return max(numbers)


def run_case(name: str, rounds: int) -> dict[str, Any]:
    kind = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        table = profile(name, Path(folder) / "traces")
    listed = [[each["setting"], each["value"], each["saves_ns"] / 1e6] for each in table["advice"]]
    found: dict[str, Any] = {"name": name, "setting": kind.setting, "advice": listed}
    found["step_ms"] = fmean(row["total_ns"] for row in table["rows"]) / 1e6
    advice = next((each for each in table["advice"] if each["setting"] == kind.setting), None)
    if advice is None:
        return found
    (pairs, _) = paceline.launch(measure, nproc=2, args=(name, advice["value"], rounds), device="cpu")
    saved = [1e3 * (before - after) for before, after in pairs]
    return found | {
        "value": advice["value"],
        "code": advice["code"],
        "said_ms": advice["saves_ns"] / 1e6,
        "before_ms": 1e3 * median(before for before, _ in pairs),
        "after_ms": 1e3 * median(after for _, after in pairs),
        "saved_ms": median(saved),
        "error_ms": find_median_error(saved),
    }


def check(found: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether the setting was the first one advised, and saved what was said."""
    if "said_ms" not in found:
        return False, False
    is_first = found["advice"][0][0] == found["setting"]
    return is_first, abs(found["saved_ms"] - found["said_ms"]) <= MOST_OFF * found["said_ms"]


def describe(result: dict[str, Any]) -> str:
    lines = [
        *describe_start(result),
        "| case | advised | first | saving said, ms | measured, ms | step before | after | within 30% |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for found in result["found"]:
        is_first, is_right = check(found)
        if "said_ms" not in found:
            others = ", ".join(f"{setting}={value}" for setting, value, _ in found["advice"]) or "nothing"
            lines.append(f"| {found['name']} | not {found['setting']}, but: {others} | no | | | | | no |")
            continue
        error = "" if found["error_ms"] is None else f" ± {found['error_ms']:.1f}"
        lines.append(
            f"| {found['name']} | {found['setting']} = {found['value']} ({found['code']}) "
            f"| {'yes' if is_first else 'no'} | {found['said_ms']:.1f} | {found['saved_ms']:.1f}{error} "
            f"| {found['before_ms']:.1f} | {found['after_ms']:.1f} | {'yes' if is_right else 'no'} |"
        )
    number = len(result["found"])
    lines += ["", f"right: {sum(all(check(found)) for found in result['found'])} of {number}", ""]
    return "\n".join(lines)


def passes(result: dict[str, Any]) -> bool:
    right = sum(all(check(found)) for found in result["found"])
    return right >= min(LEAST_RIGHT, len(result["found"]))


def run_cases(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        found.append(run_case(name, args.rounds))
        report(found[-1])
    return found


if __name__ == "__main__":
    sys.exit(run_benchmark(HERE, __doc__, list(CASES), run_cases, describe, passes, rounds=12))
