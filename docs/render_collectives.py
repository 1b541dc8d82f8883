"""Run each collective on 4 ranks, and write each rank's numbers before and after to tables/collectives.txt.

python docs/render_collectives.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import paceline
from paceline.launching.local import launch

FILE = Path(__file__).parent / "tables" / "collectives.txt"
RANKS = 4
NOTHING = -1
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def run() -> list[tuple[str, list[int], list[int]]]:
    """On one rank: every operation with this rank's numbers before and after it."""
    with paceline.start(device="cpu") as world:
        found = []
        for name, before, call in list_operations(world.rank):
            start = before.tolist()
            found.append((name, start, call(before).tolist()))
            world.barrier()
        return found


def list_operations(rank: int) -> list[tuple[str, Tensor, Callable[[Tensor], Tensor]]]:
    row = torch.arange(RANKS) + 10 * (rank + 1)
    one = row[:1].clone()
    on_root = row.clone() if rank == 0 else torch.full((RANKS,), NOTHING)

    def into(count: int, call: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], Tensor]:
        def run_call(before: Tensor) -> Tensor:
            after = torch.full((count,), NOTHING)
            call(after, before)
            return after

        return run_call

    def in_place(call: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
        def run_call(before: Tensor) -> Tensor:
            call(before)
            return before

        return run_call

    def reduce(tensor: Tensor) -> Tensor:
        dist.reduce(tensor, 0)
        return tensor if rank == 0 else torch.full((RANKS,), NOTHING)  # elsewhere the contents mean nothing

    def gather(after: Tensor, before: Tensor) -> None:
        dist.gather(before, list(after.split(1)) if rank == 0 else None, dst=0)

    def scatter(after: Tensor, before: Tensor) -> None:
        dist.scatter(after, list(before.split(1)) if rank == 0 else None, src=0)

    return [
        ("all_reduce", row.clone(), in_place(dist.all_reduce)),
        ("reduce_scatter", row.clone(), into(1, reduce_scatter)),
        ("all_gather", one, into(RANKS, all_gather)),
        ("broadcast", on_root.clone(), in_place(lambda tensor: dist.broadcast(tensor, 0))),
        ("reduce", row.clone(), reduce),
        ("gather", one, into(RANKS, gather)),
        ("scatter", on_root.clone(), into(1, scatter)),
        ("all_to_all", row.clone(), into(RANKS, dist.all_to_all_single)),
    ]


def draw(found: list[list[tuple[str, list[int], list[int]]]]) -> str:
    lines = []
    for operations in zip(*found, strict=True):
        lines.append(operations[0][0])
        for rank, (_, before, after) in enumerate(operations):
            lines.append(f"  rank {rank}  {_row(before):<19}  ->  {_row(after)}".rstrip())
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _row(numbers: list[int]) -> str:
    return "[" + " ".join("  ." if number == NOTHING else f"{number:3}" for number in numbers) + "]"


if __name__ == "__main__":
    FILE.write_text(draw(launch(run, RANKS, device="cpu", hang_after_s=None)), encoding="utf-8")
