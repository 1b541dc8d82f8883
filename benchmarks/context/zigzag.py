"""Time of a causal attention on the slowest rank of cp: in zigzag, against consecutive positions.

    python benchmarks/context/zigzag.py              # all of README.md
    python benchmarks/context/zigzag.py --rounds 3   # a quick look

Keeps the raw times in results/zigzag.json and their summary in zigzag.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from alternate import Conditions

import paceline
from paceline.bench.spread import Spread
from paceline.launching.local import launch
from paceline.mesh import build_mesh
from paceline.parallel.context.gather import attend_by_rows
from paceline.parallel.context.row_exchange import Rows
from paceline.recipe import Layout
from paceline.torch_seams.operators import ATTENTION

HERE = Path(__file__).parent
HEADS, WIDTH = 4, 64
CASES = [("gather", num_ranks, length) for num_ranks in (2, 4) for length in (2048, 4096)]


def run_ranks(by: str, length: int, num_rounds: int) -> dict[str, list[float]]:
    """Run on every rank: CPU seconds of forward and backward, in alternating order."""
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        axis = build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp
        ways = {"consecutive": Rows(axis), "zigzag": Rows(axis, is_causal=True)}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(num_rounds + 1):
            for name, rows in list(ways.items())[:: 1 if number % 2 else -1]:
                rows.divide(length)
                given = [torch.randn(1, HEADS, rows.own, WIDTH, requires_grad=True) for _ in range(3)]
                change = attend_by_rows(rows, gathers=True, is_causal=True)
                torch.distributed.barrier()
                start = time.process_time()
                change(ATTENTION, tuple(given), {"is_causal": True}, ATTENTION).sum().backward()
                found[name].append(time.process_time() - start)
    return {name: seconds[1:] for name, seconds in found.items()}  # the first warms up


def measure(by: str, num_ranks: int, length: int, num_rounds: int) -> dict[str, Any]:
    """Measure one way to attend: in each round, the times of the rank that takes longest."""
    conditions = Conditions()
    ranks = launch(run_ranks, nproc=num_ranks, args=(by, length, num_rounds))
    slowest = {
        name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]
    }
    return {"by": by, "num_ranks": num_ranks, "length": length, "cpu_s": slowest} | conditions.read(
        "gloo", "1 thread per rank"
    )


def show(found: list[dict[str, Any]]) -> str:
    """Return the table."""
    lines = ["| by | cp | positions | consecutive, ms | zigzag, ms | ratio |", "|---|---|---|---|---|---|"]
    for case in found:
        before, after = case["cpu_s"]["consecutive"], case["cpu_s"]["zigzag"]
        ratio = Spread.of([b / a for a, b in zip(before, after, strict=True)])
        times = " | ".join(f"{Spread.of(each).median * 1e3:.1f}" for each in (before, after))
        lines.append(
            f"| {case['by']} | {case['num_ranks']} | {case['length']:,} | {times} | "
            f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=20, help="pairs of measurements per case")
    rounds = parser.parse_args().rounds
    found = [measure(*case, rounds) for case in CASES]
    (HERE / "results" / "zigzag.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (HERE / "zigzag.txt").write_text(show(found), encoding="utf-8")
    print(show(found))


if __name__ == "__main__":
    main()
