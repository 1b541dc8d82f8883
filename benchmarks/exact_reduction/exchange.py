"""One bucket of 26 MB summed over 2 and 4 ranks: wall and processor time of each way to do it.

    python benchmarks/exact_reduction/exchange.py          # a minute; writes results/exchange.txt

The ways alternate in the same processes; the report is the median of rank 0.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from paceline.comm.tree import plan_reduction
from paceline.comm.tree_exchange import Exchange
from paceline.launching.local import launch
from paceline.world import start

LENGTH = 6_500_000
NUM_REPEATS = 25
NUM_WARM_UP = 3


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure() -> dict[str, tuple[float, float]]:
    """Measure on each rank, by way, milliseconds of wall and of processor time."""
    with start(device="cpu", threads_per_rank=1) as world:
        num_ranks = world.world_size
        length = LENGTH // num_ranks * num_ranks
        bucket, received = torch.randn(length), torch.empty(length)
        plan = plan_reduction((1,) * num_ranks)
        messages = Exchange(dist.new_group())

        def by_collectives() -> None:
            dist.all_to_all_single(received, bucket)
            rows = received.view(num_ranks, -1)
            for left, right in plan.additions:
                rows[left].add_(rows[right])
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(bucket, rows[0])

        ways: dict[str, Callable[[], object]] = {
            "all-reduce (the fast reduction)": lambda: dist.all_reduce(bucket),
            "exact, messages": lambda: messages.sum_subtrees([bucket], plan, bucket),
            "exact, all-to-all and all-gather": by_collectives,
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(NUM_WARM_UP + NUM_REPEATS):
            for name, way in ways.items():
                bucket.fill_(1.0)
                world.barrier()
                wall, cpu = time.perf_counter(), cpu_s()
                way()
                if number >= NUM_WARM_UP:
                    times[name].append((time.perf_counter() - wall, cpu_s() - cpu))
        return {
            name: (median(wall for wall, _ in found) * 1e3, median(cpu for _, cpu in found) * 1e3)
            for name, found in times.items()
        }


def main() -> None:
    found = {num_ranks: launch(measure, num_ranks)[0] for num_ranks in (2, 4)}
    lines = [f"{LENGTH * 4 / 1e6:.0f} MB, fp32, torch {torch.__version__}, gloo; ms, median of {NUM_REPEATS}"]
    lines.append(f"{'':<34}" + "".join(f"{f'{n} ranks':>10}{'processor':>12}" for n in found))
    for name in found[2]:
        cells = "".join(f"{found[n][name][0]:>10.1f}{found[n][name][1]:>12.1f}" for n in found)
        lines.append(f"{name:<34}{cells}")
    print("\n".join(lines))
    (Path(__file__).parent / "results" / "exchange.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
