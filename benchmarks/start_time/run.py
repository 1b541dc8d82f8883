"""Measures the time until all ranks have done their first all-reduce, under torchrun and `paceline run`.

    python benchmarks/start_time/run.py           # eleven minutes on two cores, seven with --no-cold
    python benchmarks/start_time/run.py --pairs 2 --ranks 2 --out /tmp/start.txt    # a quick look

Prints a table and writes it to results.txt, with the seconds of every single run in results.json beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from paceline.bench.spread import Spread

HERE = Path(__file__).parent
LAUNCHERS = {"torchrun": ["torchrun"], "paceline": ["paceline", "run"], "cold": ["paceline", "run", "--cold"]}
TITLES = {name: " ".join(words) for name, words in LAUNCHERS.items()}
TIME_LIMIT_S = 120
# A launcher's variables, and settings of torch or Python, that whoever runs this may have.
DROPPED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DROPPED_PREFIXES = ("TORCH", "PACELINE_", "PET_", "GROUP_", "ROLE_", "SLURM_", "OMPI_", "PYTHON")


@dataclass(frozen=True)
class Case:
    """A script on a number of ranks."""

    script: str
    num_ranks: int


@dataclass(frozen=True)
class Times:
    """Seconds of one run, from just before the launcher was started.

    Attributes:
        first_s: until the last rank had the result of its first all-reduce (or had done its first step).
        total_s: until the launcher had ended.
    """

    first_s: float
    total_s: float


def time_once(case: Case, launcher: str) -> Times:
    """Run a script once, in an empty folder.

    Raises:
        RuntimeError: it failed, or took longer than TIME_LIMIT_S.
    """
    program, *words = LAUNCHERS[launcher]
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as output:
        command = [str(Path(sys.executable).parent / program), *words]
        command += ["--nproc-per-node", str(case.num_ranks), str(HERE / case.script), name]
        start_s = time.time()
        process = subprocess.Popen(
            command,
            cwd=name,
            env=build_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(TIME_LIMIT_S)
            total_s = time.time() - start_s
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        files = sorted(Path(name).glob("rank-*"))
        if code != 0 or len(files) != case.num_ranks:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command)}: exit code {code}, its output:\n{output.read()[-4000:]}")
        done_s = max(float(file.read_text(encoding="utf-8")) for file in files)
    return Times(done_s - start_s, total_s)


def build_environment() -> dict[str, str]:
    """Return an environment with one thread per rank under all launchers, torchrun's default."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in DROPPED and not name.startswith(DROPPED_PREFIXES)
    }
    return kept | {"OMP_NUM_THREADS": "1"}


def measure(case: Case, names: list[str], num_pairs: int) -> dict[str, list[Times]]:
    """Time the launchers one after the other, then in reverse order, and so on."""
    times: dict[str, list[Times]] = {name: [] for name in names}
    for number in range(num_pairs):
        for name in names if number % 2 == 0 else reversed(names):
            times[name].append(time_once(case, name))
    return times


def describe(case: Case, times: dict[str, list[Times]]) -> list[list[str]]:
    """Return a row for each launcher."""
    base = times["torchrun"]
    rows = []
    for name, runs in times.items():
        cells = [Path(case.script).stem, str(case.num_ranks), TITLES[name]]
        for column in ("first_s", "total_s"):
            seconds = [getattr(run, column) for run in runs]
            ratio = Spread.of(getattr(a, column) / b for a, b in zip(base, seconds, strict=True))
            low, middle, high = quantiles(seconds, n=4, method="inclusive")
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            cells.append("" if name == "torchrun" else f"{ratio:.2f}")
        rows.append(cells)
    return rows


def format_table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in rows]


HEADS = [
    "script",
    "ranks",
    "launcher",
    "first, s (quartiles)",
    "torchrun's : its",
    "end, s (quartiles)",
    "torchrun's : its",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--pairs", type=int, default=10, help="runs of each launcher in each row (default: 10)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="default: 2 4 8")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results.txt", help="the table; the seconds beside it"
    )
    parser.add_argument("--no-cold", action="store_true", help="without `paceline run --cold`")
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("quartiles need --pairs 2 or more")

    import torch

    began_s, load = time.monotonic(), os.getloadavg()[0]
    confidence = Spread.of(range(args.pairs)).confidence
    names = [name for name in LAUNCHERS if name != "cold" or not args.no_cold]
    rows, raw = [HEADS], []
    cases = [Case("first_all_reduce.py", n) for n in args.ranks] + [Case("first_step.py", min(args.ranks))]
    for name in names:  # so that the first row has torch's files in memory too
        time_once(cases[-1], name)
    for case in cases:
        times = measure(case, names, args.pairs)
        rows += describe(case, times)
        seconds = {
            f"{name}_{column}": [round(getattr(run, column), 4) for run in runs]
            for name, runs in times.items()
            for column in ("first_s", "total_s")
        }
        raw.append({"script": case.script, "ranks": case.num_ranks, **seconds})
        minutes = (time.monotonic() - began_s) / 60
        about = [
            f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, gloo; "
            f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after; {minutes:.1f} minutes",
            f"{args.pairs} pairs a row; medians, (quartiles); torchrun's : its, the median of the pairs' "
            f"ratios and its {confidence:.0%} interval",
        ]
        print(*format_table([HEADS, *rows[-len(names) :]]), "", sep="\n", flush=True)
        # After each row, so that an early end leaves what there is.
        write(args.out, "\n".join([*about, "", *format_table(rows)]), raw)
    print(args.out.read_text(encoding="utf-8"), end="")
    return 0


def write(path: Path, table: str, raw: list[dict[str, Any]]) -> None:
    path.write_text(table + "\n", encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
