"""Measures how long a save stops training: Paceline, torch.save and DCP take turns in one trainer.

    python benchmarks/saving/run.py                                  # all of README.md: about two hours
    python benchmarks/saving/run.py --millions 20 --ranks 2 --rounds 4
    python benchmarks/saving/run.py --millions 100 --ranks 2 4 --layouts dp_shard --minutes 12
    python benchmarks/saving/run.py --tables                         # the tables again, from results/

Keeps raw numbers in results/*.json and writes all tables to results.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LAYOUTS = ("dp_shard", "dp_replicate")


def measure(
    millions: float, ranks: int, axis: str, rounds: int, folder: str | None, minutes: float, only: str
) -> Path:
    """Run one combination; the file with its numbers."""
    out = RESULTS / f"{millions:g}M-{ranks}-{axis}.json"
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="saving-", dir=folder) as temporary:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        command += [str(HERE / "body.py"), str(millions), f"{axis}={ranks}", str(rounds), temporary, str(out)]
        command += [str(minutes)]
        command += [only] if only else []
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return out


def describe(found: dict[str, Any]) -> Iterator[str]:
    """Yield the tables of one combination, line by line."""
    yield f"## {found['millions']:g}M parameters, {found['ranks']} ranks, {found['layout']}"
    yield ""
    yield "| way | stall, ms | spread | first save, ms | durable, s | excess of later steps, ms | n |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    rows: dict[str, list[dict[str, float]]] = {}
    for row in found["rows"]:
        rows.setdefault(row["way"], []).append(row)
    for way, all_rows in rows.items():
        first, later = all_rows[0], all_rows[1:] or all_rows
        stalls = [1e3 * row["stall_s"] for row in later]
        durable_s = statistics.median(row["durable_s"] for row in later)
        excess = 1e3 * statistics.median(row["excess_s"] for row in later)
        yield (
            f"| {way} | {statistics.median(stalls):.1f} | {min(stalls):.1f} to {max(stalls):.1f} | "
            f"{1e3 * first['stall_s']:.1f} | {durable_s:.2f} | {excess:.0f} | {len(later)} |"
        )
    loads = [row["load"] for row in found["rows"]]
    yield ""
    step_ms = 1e3 * statistics.median(row["step_s"] for row in found["rows"])
    yield f"Load of the machine: {min(loads):.1f} to {max(loads):.1f}. Median step: {step_ms:.1f} ms."
    every = found.get("every_step", {})
    if every:
        yield (
            f"With an asynchronous sharded save after every step: {1e3 * every['with_s']:.1f} ms, without: "
            f"{1e3 * every['without_s']:.1f} ms, ratio {every['with_s'] / every['without_s']:.3f}."
        )
    yield ""
    yield "| rank | share of 1/N | copied | written | memory of the copy |"
    yield "|---:|---:|---:|---:|---:|"
    for count in found.get("counts", ()):
        share = count["state_bytes"] / found["ranks"]
        sizes = [count["copied_bytes"], count["written_bytes"], count["memory_bytes"]]
        ratios = " | ".join(f"{size / 1e6:.1f} MB ({size / share:.3f})" for size in sizes)
        yield f"| {count['rank']} | {share / 1e6:.1f} MB | {ratios} |"


def write_tables() -> None:
    """Write results.txt from all results."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("*.json")):
        lines += [*describe(json.loads(path.read_text())), ""]
    (HERE / "results.txt").write_text("\n".join(lines))
    print("\n".join(lines))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--millions", type=float, nargs="*", default=[20, 100], help="parameters")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), help="dp_shard, dp_replicate")
    parser.add_argument("--rounds", type=int, default=8, help="saves of each way, after the first one")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="per combination: no further save after these; 0: no limit"
    )
    parser.add_argument("--folder", help="on the disk to write to; default the temporary folder's")
    parser.add_argument("--only", default="", help="ways with ; between, such as 'dcp.save;paceline sharded'")
    parser.add_argument("--tables", action="store_true", help="only write the tables again")
    args = parser.parse_args()
    if not args.tables:
        for millions in args.millions:
            for ranks in args.ranks:
                for axis in args.layouts:
                    measure(millions, ranks, axis, args.rounds, args.folder, args.minutes, args.only)
    write_tables()


if __name__ == "__main__":
    main()
