"""Measures collectives on the running ranks, by size.

A barrier precedes each call, and the slowest rank counts, as in nccl-tests. Calls of all kinds and sizes
alternate, in turns of opposite order, so that a machine that slows down affects all.

Bus bandwidth is size / time, times the operation's factor, as nccl-tests define it (doc/PERFORMANCE.md).
Sizes are those of `paceline.plan.call_sizes`, and rank 0 is the root. The sizes between the smallest and the
largest are predicted from these two by `fit_line` there, as `paceline plan` predicts all sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.bench.spread import Spread
from paceline.comm.nodes import find_nodes
from paceline.comm.one_tensor import all_gather, reduce_scatter
from paceline.launching.local import launch
from paceline.place import usable_cores
from paceline.plan.call_sizes import BUS_FACTORS, fit_line
from paceline.world import World, start

SIZES = (64, 4096, 65536, 1 << 20, 8 << 20)
# A cell is measured as often as asked, unless its calls would take longer than this in all.
_CELL_S = 3.0
_FEWEST = 5
_WARM_UP = 2


@dataclass(frozen=True)
class Cell:
    """An operation with a size.

    Attributes:
        operation: as torch.distributed calls it.
        num_bytes: the size; 0 for a barrier.
        time_s: from a barrier to the slowest rank's end.
        bus_bytes_per_s: size over median time, times the operation's factor; None for a barrier.
        predicted_s: from the smallest and the largest size; None for these.
    """

    operation: str
    num_bytes: int
    time_s: Spread
    bus_bytes_per_s: float | None
    predicted_s: float | None

    @property
    def error(self) -> float | None:
        """Predicted over median time, less 1."""
        return None if self.predicted_s is None else self.predicted_s / self.time_s.median - 1


@dataclass(frozen=True)
class Collectives:
    """The result of `measure_collectives`; `dataclasses.asdict` of it is JSON-able.

    Attributes:
        nodes: each rank's node.
        hosts: the nodes' host names.
        backend: that carried the calls.
        cells: by operation and size.
        lines: seconds of an empty call and bus bandwidth, by operation; empty with one size.
        num_cores: cores that rank 0 may use.
    """

    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    backend: str
    cells: list[Cell]
    lines: dict[str, tuple[float, float]]
    num_cores: int


def measure_collectives(
    num_ranks: int | None,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 15,
) -> Collectives:
    """Measure every operation at every size.

    Args:
        num_ranks: ranks to start on this machine; None in a process that is a rank, as all of them must be
            then.
        sizes: in bytes; rounded up to a multiple of 4 bytes per rank.
        repeats: calls per cell; fewer where they take long.
    """
    args = (tuple(sizes), repeats)
    if num_ranks is None:
        return _run(*args)
    found: list[Collectives] = launch(_run, num_ranks, args, hang_after_s=None)
    return found[0]


def _run(sizes: Sequence[int], repeats: int) -> Collectives:
    with start(device="cpu", threads_per_rank=1) as world:
        hosts, nodes = find_nodes()
        cells, lines = _measure(world, sizes, repeats)
        return Collectives(
            nodes=nodes,
            hosts=hosts,
            backend=world.backend,
            cells=cells,
            lines=lines,
            num_cores=usable_cores(),
        )


def _time(call: Callable[[], object]) -> float:
    """Return the seconds of a call after a barrier, on the slowest rank."""
    dist.barrier()
    began_s = time.perf_counter()
    call()
    slowest = torch.tensor(time.perf_counter() - began_s, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.item())


# ---- calls


def build_calls(
    num_bytes: int,
    num_ranks: int,
    rank: int,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[int, dict[str, Callable[[], object]]]:
    """Return the bytes that a size amounts to, and a call of every operation with data.

    Args:
        rank: in the world; rank 0 is the root of operations that have one.
        group: of the ranks; all of them by default.
    """
    count = max(1, -(-num_bytes // (4 * num_ranks)))
    # Zeros stay zeros however often they are summed; other numbers would overflow, and then take longer.
    part, whole, other = (torch.zeros(count * factor, device=device) for factor in (1, num_ranks, num_ranks))
    parts = list(other.view(num_ranks, -1)) if rank == 0 else None
    return 4 * count * num_ranks, {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce_scatter": lambda: reduce_scatter(part, other, group=group),
        "all_gather": lambda: all_gather(other, part, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "reduce": lambda: dist.reduce(whole, 0, group=group),
        "gather": lambda: dist.gather(part, parts, dst=0, group=group),
        "scatter": lambda: dist.scatter(part, parts, src=0, group=group),
        "all_to_all": lambda: dist.all_to_all_single(whole, other, group=group),
    }


def _measure(
    world: World, sizes: Sequence[int], repeats: int
) -> tuple[list[Cell], dict[str, tuple[float, float]]]:
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for size in sizes:
        num_bytes, by_name = build_calls(size, world.world_size, world.rank)
        calls |= {(name, num_bytes): call for name, call in by_name.items()}
    calls["barrier", 0] = dist.barrier
    times: dict[tuple[str, int], list[float]] = {}
    wanted: dict[tuple[str, int], int] = {}
    for cell, call in calls.items():
        slowest_s = max(_time(call) for _ in range(_WARM_UP))
        wanted[cell] = max(min(_FEWEST, repeats), min(repeats, int(_CELL_S / slowest_s)))
        times[cell] = []
    for turn in range(repeats):
        for cell in calls if turn % 2 == 0 else reversed(calls):
            if turn < wanted[cell]:
                times[cell].append(_time(calls[cell]))
    return summarise(times, world.world_size)


def summarise(
    times: Mapping[tuple[str, int], Sequence[float]], num_ranks: int
) -> tuple[list[Cell], dict[str, tuple[float, float]]]:
    """Return the cells, and the line of each operation with two sizes or more.

    Args:
        times: of calls, by operation and size.
        num_ranks: that took part.
    """
    cells, lines = [], {}
    for name in [*BUS_FACTORS, "barrier"]:
        factor = BUS_FACTORS[name](num_ranks) if name in BUS_FACTORS else 0.0
        taken = {size: Spread.of(each) for (own, size), each in sorted(times.items()) if own == name}
        if len(taken) > 1:
            lines[name] = fit_line({size: each.median for size, each in taken.items()}, factor)
        for size, each in taken.items():
            is_between = min(taken) < size < max(taken)
            predicted_s = lines[name][0] + factor * size / lines[name][1] if is_between else None
            bus = factor * size / each.median if factor else None
            cells.append(Cell(name, size, each, bus, predicted_s))
    return cells, lines
