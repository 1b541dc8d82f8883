"""Compare `paceline bench` with what a course's script measures of itself in the same starts.

python benchmarks/by_hand/run.py      about 2 minutes; writes results.json and prints the table
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
WARM_UP, STEPS, REPEATS, BLOCK, BLOCKS = 3, 60, 3, 5, 10


def bench(folder: Path, name: str, *words: str) -> dict[str, Any]:
    """Return what `paceline bench` measures of the script."""
    command = [sys.executable, "-m", "paceline", "bench", name, str(HERE / "chapter.py"), "--json"]
    command += [*words, "--", str(folder / name)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    table: dict[str, Any] = json.loads(done.stdout)
    return table


def read_starts(folder: Path, name: str, num_ranks: int) -> list[list[list[float]]]:
    """Return the clocks of each start by rank."""
    texts = [(folder / f"{name}-{num_ranks}-{rank}").read_text() for rank in range(num_ranks)]
    ranks = [[[float(n) for n in part.split()] for part in text.split("start")[1:]] for text in texts]
    return [list(start) for start in zip(*ranks, strict=True)]


def by_hand(starts: Sequence[Sequence[Sequence[float]]], first: int = WARM_UP, steps: int = STEPS) -> float:
    """Return the seconds of a step: the slowest rank's of each start, and the median over starts.

    The timer ends a rank within its last step, whose clock is then missing.
    """

    def of_rank(clock: Sequence[float]) -> float:
        last = min(first + steps, len(clock)) - 1
        return (clock[last] - clock[first - 1]) / (last - first + 1)

    return median(max(map(of_rank, ranks)) for ranks in starts)


def measure(folder: Path) -> dict[str, tuple[float, float]]:
    """Return by hand and by the command the seconds of a step, by what was measured."""
    found = {}
    repeats = ("--steps", str(STEPS), "--repeats", str(REPEATS))
    for point in bench(folder, "scaling", "--ranks", "1,2", *repeats)["points"]:
        own = by_hand(read_starts(folder, "scaling", point["num_ranks"]))
        found[f"scaling, {point['num_ranks']} ranks"] = own, point["step_s"]
    ways = bench(folder, "overhead", "--nproc", "2", "--steps", str(BLOCK), "--repeats", str(BLOCKS))["ways"]
    clocks = read_starts(folder, "overhead", 2)
    blocks: dict[str, list[float]] = {"whole": [], "alone": []}
    for number in range(2 * BLOCKS):
        kind = ("whole", "alone", "alone", "whole")[number % 4]
        blocks[kind].append(by_hand(clocks, 2 * WARM_UP + number * BLOCK, BLOCK))
    for kind, own in blocks.items():
        found[f"overhead, {kind}"] = median(own), ways[kind]["step_s"]["median"]
    ways = bench(folder, "buckets", "--nproc", "2", "--sizes", "1", *repeats)["ways"]
    starts = read_starts(folder, "buckets", 2)[1:]  # the first one reads the script's own size
    for size, places in (("25", (0, 3, 4)), ("1", (1, 2, 5))):
        own = by_hand([starts[place] for place in places])
        found[f"buckets, {size} MiB"] = own, ways[size]["step_s"]["median"]
    ways = bench(folder, "dp", "--nproc", "2", *repeats)["ways"]
    for kind, num_ranks in (("threads", 1), ("ranks", 2)):
        found[f"dp, {kind}"] = by_hand(read_starts(folder, "dp", num_ranks)), ways[kind]["step_s"]["median"]
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        results = measure(Path(place))
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print("| | by hand, ms | `paceline bench`, ms | ratio |\n|---|--:|--:|--:|")
    for what, (hand, ours) in results.items():
        print(f"| {what} | {1e3 * hand:.2f} | {1e3 * ours:.2f} | {ours / hand:.3f} |")
