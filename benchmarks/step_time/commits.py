"""Compare the step time of a recipe between two commits, by runs of both in turn.

    python benchmarks/step_time/commits.py BEFORE [AFTER]        # AFTER is HEAD by default
    python benchmarks/step_time/commits.py v0.1 --pairs 20 --set layout.dp_shard=2 --set layout.dp_replicate=1

Each commit is checked out into a folder of its own. A run's time is the median of its steps, without the
first ones. Pairs of runs begin with each commit in turn, and the ratio is taken pair by pair. Exit code 1 if
the upper end of its interval is above --limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.bench.spread import Spread

ROOT = Path(__file__).resolve().parents[2]
WARM_UP_STEPS = 30


def check_out(commit: str, folder: Path) -> None:
    """Make a folder with the files of a commit."""
    found = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=found.stdout, check=True)


def time_run(code: Path, args: argparse.Namespace) -> float:
    """Return the median step time of one run, in seconds."""
    settings = [f"train.steps={args.steps}", "train.eval_every=0", *args.set]
    with tempfile.TemporaryDirectory(prefix="paceline-commits-") as out:
        words = [sys.executable, "-m", "paceline", "train", args.recipe, "--nproc", str(args.nproc)]
        words += [word for setting in settings for word in ("--set", setting)]
        env = {**os.environ, "PYTHONPATH": str(code / "src")}
        subprocess.run([*words, "--out", out], cwd=code, env=env, check=True, capture_output=True)
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_s"] for row in rows if row["step"] > WARM_UP_STEPS)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", help="commit")
    parser.add_argument("after", nargs="?", default="HEAD", help="commit (HEAD)")
    parser.add_argument("--recipe", default="recipes/gpt-stdlib.toml", help="in both commits")
    parser.add_argument("--nproc", type=int, default=2, help="ranks (2)")
    parser.add_argument("--steps", type=int, default=200, help="per run (200)")
    parser.add_argument("--pairs", type=int, default=12, help="of runs (12)")
    parser.add_argument("--set", action="append", default=[], help="setting of the recipe, in both commits")
    parser.add_argument("--limit", type=float, default=1.02, help="of the upper end of the ratio (1.02)")
    args = parser.parse_args()
    times: dict[str, list[float]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory(prefix="paceline-commits-") as scratch:
        code = {name: Path(scratch) / name for name in times}
        for name, folder in code.items():
            check_out(getattr(args, name), folder)
        for number in range(args.pairs):
            for name in times if number % 2 == 0 else reversed(times):
                times[name].append(time_run(code[name], args))
            print(
                f"pair {number}: " + ", ".join(f"{n} {1e3 * t[-1]:.2f} ms" for n, t in times.items()),
                flush=True,
            )
    ratio = Spread.of(after / before for before, after in zip(times["before"], times["after"], strict=True))
    print(
        f"{args.recipe} on {args.nproc} ranks, {args.pairs} pairs of runs of {args.steps} steps, load "
        f"{os.getloadavg()[0]:.1f}: {1e3 * statistics.median(times['before']):.2f} ms before, "
        f"{1e3 * statistics.median(times['after']):.2f} ms after, ratio {ratio:.3f}"
    )
    return 1 if ratio.high > args.limit else 0


if __name__ == "__main__":
    sys.exit(main())
