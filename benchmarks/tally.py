"""The parts of benchmarks/blame that time, read the command line and report results."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any, Protocol

import torch.distributed as dist
from machine import describe_machine

Table = dict[str, Any]


class Steps(Protocol):
    """A training that can take a step."""

    def step(self) -> None: ...


def time_steps(job: Steps, number: int) -> float:
    """Return the mean seconds of some steps, until all ranks have taken them; called on every rank."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(number):
        job.step()
    dist.barrier()
    return (time.perf_counter() - began) / number


def find_median_error(values: Sequence[float]) -> float | None:
    """Return by how much the median may be off, at 95%; `None` for a single value."""
    return 1.25 * 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def describe_start(result: Table) -> list[str]:
    """Return the lines on the machine and on when it ran, an empty one included."""
    more = f", {result['rounds']} rounds" if "rounds" in result else ""
    load = f"load before {result['load_before']:.2f}, after {result['load_after']:.2f}"
    return [result["machine"], f"{result['started']}, {load}{more}", ""]


def run_benchmark(
    folder: Path,
    text: str,
    names: Sequence[str],
    measure: Callable[[argparse.Namespace, list[str]], list[Table]],
    describe: Callable[[Table], str],
    passes: Callable[[Table], bool],
    rounds: int = 0,
) -> int:
    """Run cases as the command line says, print the table, and return the exit code.

    Args:
        folder: for results.json and results.txt, which are written if all cases run.
        text: of --help.
        names: of all cases.
        measure: returns a table per chosen case.
        describe: returns the text of a result.
        passes: whether a result keeps the claim.
        rounds: the default of --rounds; 0 without this flag.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases (default: all)")
    parser.add_argument("--tables", action="store_true", help="print the last results")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="how often both settings run in turn")
    args = parser.parse_args()
    path = folder / "results.json"
    if args.tables:
        print(describe(json.loads(path.read_text())))
        return 0
    result: Table = {
        "machine": f"{describe_machine()}, gloo, 1 thread per rank",
        "started": time.strftime("%Y-%m-%d %H:%M"),
        **({"rounds": args.rounds} if rounds else {}),
        "load_before": os.getloadavg()[0],
    }
    result["found"] = measure(args, args.names or list(names))
    result["load_after"] = os.getloadavg()[0]
    described = describe(result)
    print(described)
    if not args.names:
        path.write_text(json.dumps(result, indent=1) + "\n")
        (folder / "results.txt").write_text(described)
    return 0 if passes(result) else 1


def report(found: Table) -> None:
    """Print what one case has given, before all have."""
    print(json.dumps(found), file=sys.stderr, flush=True)
