"""Sums of one vector of 4 B to 100 MB over 2 and 4 ranks: gloo's all-reduce against exact sums, alternating.

    python benchmarks/exact_reduction/sizes.py             # a minute; writes results/sizes.txt
    python benchmarks/exact_reduction/sizes.py --busy 4    # beside so many busy processes: sizes-busy.txt

Each call begins at an instant that all ranks share, and lasts until the last rank has ended it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from paceline.comm.shared_memory import SharedMemoryExchange

from paceline.bench.common_clock import CommonClock
from paceline.bench.spread import Spread
from paceline.comm.exchange import MessageExchange
from paceline.comm.tree import plan_reduction
from paceline.launching.local import launch
from paceline.world import start

# Size in bytes: rounds.
SIZES = {4: 60, 4096: 100, 1 << 16: 60, 1 << 18: 40, 1 << 20: 40, 1 << 22: 30, 25_000_000: 15, 100_000_000: 9}
LIBRARY = "all-reduce"


def measure() -> dict[int, dict[str, list[float]]]:
    """Measure on each rank, by size and way, milliseconds per call."""
    with start(device="cpu", threads_per_rank=1) as world:
        plan = plan_reduction((1,) * world.world_size)
        shared, messages = SharedMemoryExchange(dist.new_group()), MessageExchange(dist.new_group())
        clock = CommonClock(world)
        found: dict[int, dict[str, list[float]]] = {}
        for size, num_rounds in SIZES.items():
            vector = torch.zeros(size // 4)
            ways: dict[str, Callable[[], object]] = {
                LIBRARY: partial(dist.all_reduce, vector),
                "shared memory": partial(shared.sum_subtrees, [[vector]], plan, vector),
                "messages": partial(messages.sum_subtrees, [[vector]], plan, vector),
            }
            for way in (*ways.values(), *ways.values()):
                clock.time(way)
            times: dict[str, list[float]] = {name: [] for name in ways}
            names = list(ways)
            for number in range(num_rounds):
                for name in names[number % 3 :] + names[: number % 3]:
                    times[name].append(1e3 * clock.time(ways[name]))
            found[size] = times
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, default=0, help="busy processes beside the ranks")
    busy = parser.parse_args().busy
    with ExitStack() as stack:
        for _ in range(busy):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        found = {num_ranks: launch(measure, num_ranks)[0] for num_ranks in (2, 4)}
    beside = f", {busy} busy processes beside the ranks" if busy else ""
    lines = [f"fp32, torch {torch.__version__}, gloo, {os.cpu_count()} cores{beside}; ms, medians", ""]
    lines.append(
        f"{'bytes':>11}{'ranks':>7}{LIBRARY:>12}{'messages':>10}{'shared':>9}   shared / {LIBRARY} (95%)"
    )
    for num_ranks, by_size in found.items():
        for size, times in by_size.items():
            ratio = Spread.of(a / b for a, b in zip(times["shared memory"], times[LIBRARY], strict=True))
            library, shared, messages = (
                median(times[name]) for name in (LIBRARY, "shared memory", "messages")
            )
            lines.append(
                f"{size:>11,}{num_ranks:>7}{library:>12.3f}{messages:>10.3f}{shared:>9.3f}   {ratio:.3f}"
            )
    print("\n".join(lines))
    name = "sizes-busy.txt" if busy else "sizes.txt"
    (Path(__file__).parent / "results" / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
