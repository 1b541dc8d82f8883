"""A rank that checks collectives: right results first, then the time of an all-reduce by size.

RANK=... MASTER_ADDR=... python -m paceline.doctor.cluster.rank FILE TIMEOUT_S     writes a JSON object
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.world import start

_LENGTHS = (1, 17, 1000)
_DTYPES = (torch.float32, torch.float64, torch.int64)
_SIZES = (8, 1 << 16, 1 << 20, 1 << 23)
_TRIES = 3


def main() -> None:
    """Join the other ranks, check and measure."""
    target, timeout_s = Path(sys.argv[1]), float(sys.argv[2])
    with start(device="cpu", timeout_s=timeout_s):
        wrong = sorted(
            {name for length in _LENGTHS for dtype in _DTYPES for name in _find_wrong(length, dtype)}
        )
        seconds = {str(size): _time_all_reduce(size) for size in _SIZES}
        dist.barrier()
    target.write_text(json.dumps({"wrong": wrong, "seconds": seconds}), encoding="utf-8")


def _find_wrong(length: int, dtype: torch.dtype) -> Iterator[str]:
    """Yield the collectives whose result is not the known one. Rank r's numbers are r + 1, r + 2, ..."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(1, length + 1)
    parts = [(numbers + r).to(dtype) for r in range(size)]
    total = sum(parts[1:], parts[0].clone())
    root = size - 1

    mine = parts[rank].clone()
    dist.all_reduce(mine)
    yield from () if torch.equal(mine, total) else ("all_reduce",)

    mine = parts[rank].clone()
    dist.broadcast(mine, root)
    yield from () if torch.equal(mine, parts[root]) else ("broadcast",)

    mine = parts[rank].clone()
    dist.reduce(mine, root)
    yield from () if rank != root or torch.equal(mine, total) else ("reduce",)

    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, parts[rank].clone())
    yield from () if all(map(torch.equal, gathered, parts)) else ("all_gather",)

    mine = torch.empty(length, dtype=dtype)
    dist.scatter(mine, parts if rank == root else None, root)
    yield from () if torch.equal(mine, parts[rank]) else ("scatter",)

    summed = torch.empty(length, dtype=dtype)
    dist.reduce_scatter_tensor(summed, torch.cat([part + rank for part in parts]))
    wanted = size * parts[rank] + sum(range(size))
    yield from () if torch.equal(summed, wanted.to(dtype)) else ("reduce_scatter",)

    received = torch.empty(size * length, dtype=dtype)
    dist.all_to_all_single(received, torch.cat([parts[rank] + 10 * r for r in range(size)]))
    yield from (
        () if torch.equal(received, torch.cat([part + 10 * rank for part in parts])) else ("all_to_all",)
    )

    following, before = (rank + 1) % size, (rank - 1) % size
    mine = torch.empty(length, dtype=dtype)
    for request in [dist.isend(parts[rank].clone(), following), dist.irecv(mine, before)]:
        assert request is not None
        request.wait()
    yield from () if torch.equal(mine, parts[before]) else ("send and receive",)


def _time_all_reduce(num_bytes: int) -> float:
    tensor = torch.zeros(max(num_bytes // 4, 1))
    dist.all_reduce(tensor)
    best_s = float("inf")
    for _ in range(_TRIES):
        dist.barrier()
        started_s = time.perf_counter()
        dist.all_reduce(tensor)
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s


if __name__ == "__main__":
    main()
