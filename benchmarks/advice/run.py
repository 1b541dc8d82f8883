"""Applies what profiles advise, and tallies whether steps become shorter by what was said.

    python benchmarks/advice/run.py                     # all; writes results.json and results.txt
    python benchmarks/advice/run.py Workers Searching   # some, only printed
    python benchmarks/advice/run.py --rounds 3 Workers  # with fewer alternations
    python benchmarks/advice/run.py --tables            # the last results

For each case, `paceline profile` records a script on two ranks. The setting and what it saves are read from
`paceline profile read --json`. Then both settings run in turn in the same two processes, in blocks of steps.
A case is right if the setting is advised, with the largest saving of all, and the measured saving is within
30% of what was said. Exit code 1 if fewer than 8 are right.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch.distributed as dist

import paceline
from paceline.bench.machine import describe_machine

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, Job

HERE = Path(__file__).parent
LEAST_RIGHT, MOST_OFF = 8, 0.3
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
            run_block(job, WARM_STEPS)
            took = run_block(job, WARM_STEPS) / WARM_STEPS
            counts.append(agree(max(10, min(MOST_STEPS, math.ceil(BLOCK_S / took)))))
        for number in range(rounds):
            means = [0.0, 0.0]
            for place in (0, 1) if number % 2 else (1, 0):
                job, samples = jobs[place]
                # Whole periods of what happens in each 50th step.
                steps = counts[place] if place == 0 or not isinstance(value, int) else max(50, counts[place])
                means[place] = run_block(job, steps) / steps / samples
            found.append((means[0], means[1]))
        # Gloo's thread may still drop the last collective, and a process that leaves meanwhile waits forever.
        time.sleep(0.5)
        return found


def agree(number: int) -> int:
    numbers: list[Any] = [None, None]
    dist.all_gather_object(numbers, number)
    return max(numbers)


def run_block(job: Job, steps: int) -> float:
    """Return the seconds that some steps took, until both ranks had taken them."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        job.step()
    dist.barrier()
    return time.perf_counter() - began


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
        "error_ms": 1.25 * 1.96 * stdev(saved) / math.sqrt(len(saved)) if len(saved) > 1 else None,
    }


def check(found: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether the setting was the first one advised, and saved what was said."""
    if "said_ms" not in found:
        return False, False
    is_first = found["advice"][0][0] == found["setting"]
    return is_first, abs(found["saved_ms"] - found["said_ms"]) <= MOST_OFF * found["said_ms"]


def describe(result: dict[str, Any]) -> str:
    lines = [
        result["machine"],
        f"{result['started']}, load before {result['load_before']:.2f}, after {result['load_after']:.2f}, "
        f"{result['rounds']} rounds",
        "",
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases (default: all)")
    parser.add_argument("--rounds", type=int, default=12, help="how often both settings run in turn")
    parser.add_argument("--tables", action="store_true", help="print the last results")
    args = parser.parse_args(arguments)
    path = HERE / "results.json"
    if args.tables:
        print(describe(json.loads(path.read_text())))
        return 0
    result: dict[str, Any] = {
        "machine": f"{describe_machine()}, gloo, 1 thread per rank",
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "rounds": args.rounds,
        "load_before": os.getloadavg()[0],
        "found": [],
    }
    for name in args.names or CASES:
        result["found"].append(run_case(name, args.rounds))
        print(json.dumps(result["found"][-1]), file=sys.stderr, flush=True)
    result["load_after"] = os.getloadavg()[0]
    text = describe(result)
    print(text)
    if not args.names:
        path.write_text(json.dumps(result, indent=1) + "\n")
        (HERE / "results.txt").write_text(text)
    right = sum(all(check(found)) for found in result["found"])
    return 1 if right < min(LEAST_RIGHT, len(result["found"])) else 0


if __name__ == "__main__":
    sys.exit(main())
