"""Measures collectives on the running ranks beside their prediction from measured links.

All ranks begin a call at a common instant (`bench/common_clock.py`), and it lasts until the last rank's end.
Calls of all kinds and sizes alternate, in turns of opposite order, so that a machine that slows down affects
all.

Algorithm bandwidth is size / time, and bus bandwidth that times the operation's factor, as nccl-tests define
them (doc/PERFORMANCE.md). Sizes are those of `paceline.bench.predictions`, and rank 0 is the root.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.bench.common_clock import CommonClock
from paceline.bench.link_times import SlowLink, find_slow_links, measure_links
from paceline.bench.links import Links, MeasuredLinks
from paceline.bench.predictions import ALGORITHMS, predict
from paceline.bench.spread import Spread
from paceline.comm.collectives import all_gather, reduce_scatter
from paceline.launching.local import check_launch, launch
from paceline.place import usable_cores
from paceline.plan.calls import BUS_FACTORS
from paceline.world import World, start

SIZES = (64, 4096, 65536, 1 << 20, 8 << 20)
# A cell is measured as often as asked, unless its calls would take longer than this in all.
_CELL_S = 3.0
_FEWEST = 5
_WARM_UP = 2
NEAR = 0.25


@dataclass(frozen=True)
class Cell:
    """An operation with a size.

    Attributes:
        operation: as torch.distributed calls it.
        num_bytes: the size; 0 for a barrier.
        algorithm: that gloo runs.
        time_s: from the common start to the last rank's end.
        algorithm_bytes_per_s: size over median time; None for a barrier.
        bus_bytes_per_s: that times the operation's factor; None for a barrier.
        predicted_s: by the model, from the links alone.
        error: predicted over median, less 1.
    """

    operation: str
    num_bytes: int
    algorithm: str
    time_s: Spread
    algorithm_bytes_per_s: float | None
    bus_bytes_per_s: float | None
    predicted_s: float
    error: float


@dataclass(frozen=True)
class Collectives:
    """The result of `measure_collectives`; `dataclasses.asdict` of it is JSON-able.

    Attributes:
        nodes: each rank's node.
        hosts: the nodes' host names.
        backend: that carried the calls.
        links: that the predictions use.
        slow_links: pairs and nodes that take much longer than their class.
        cells: by operation and size.
        median_error: of the cells' absolute errors.
        near_share: share of cells with an absolute error of at most 25%.
        num_cores: cores that rank 0 may use.
    """

    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    backend: str
    links: MeasuredLinks
    slow_links: list[SlowLink]
    cells: list[Cell]
    median_error: float
    near_share: float
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

    Raises:
        PacelineError: PL622 for one rank, PL954 if a rank does not answer, PL320 to PL326 for ranks that
            cannot be started.
    """
    args = (tuple(sizes), repeats)
    if num_ranks is None:
        return _run(*args)
    check_launch(num_ranks, "cpu")
    found: list[Collectives] = launch(_run, num_ranks, args, device="cpu", hang_after_s=None)
    return found[0]


def _run(sizes: Sequence[int], repeats: int) -> Collectives:
    with start(device="cpu", threads_per_rank=1) as world:
        links = measure_links(world)
        cells = _measure_cells(world, links.links, links.nodes, sizes, repeats)
        errors = [abs(cell.error) for cell in cells]
        return Collectives(
            nodes=links.nodes,
            hosts=links.hosts,
            backend=world.backend,
            links=links,
            slow_links=find_slow_links(links),
            cells=cells,
            median_error=statistics.median(errors),
            near_share=sum(error <= NEAR for error in errors) / len(errors),
            num_cores=usable_cores(),
        )


# ---- calls


def build_calls(num_bytes: int, num_ranks: int, rank: int) -> tuple[int, dict[str, Callable[[], object]]]:
    """Return the bytes that a size amounts to, and a call of every operation with data."""
    count = max(1, -(-num_bytes // (4 * num_ranks)))
    # Zeros stay zeros however often they are summed; other numbers would overflow, and then take longer.
    part, whole, other = (torch.zeros(count * factor) for factor in (1, num_ranks, num_ranks))
    parts = list(other.view(num_ranks, -1)) if rank == 0 else None
    return 4 * count * num_ranks, {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: reduce_scatter(part, other),
        "all_gather": lambda: all_gather(other, part),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "gather": lambda: dist.gather(part, parts, dst=0),
        "scatter": lambda: dist.scatter(part, parts, src=0),
        "all_to_all": lambda: dist.all_to_all_single(whole, other),
    }


def _measure_cells(
    world: World, links: Links, nodes: Sequence[int], sizes: Sequence[int], repeats: int
) -> list[Cell]:
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for size in sizes:
        num_bytes, by_name = build_calls(size, world.world_size, world.rank)
        calls |= {(name, num_bytes): call for name, call in by_name.items()}
    calls["barrier", 0] = dist.barrier
    clock = CommonClock(world)
    times: dict[tuple[str, int], list[float]] = {}
    wanted: dict[tuple[str, int], int] = {}
    for cell, call in calls.items():
        slowest_s = max(clock.time(call) for _ in range(_WARM_UP))
        wanted[cell] = max(min(_FEWEST, repeats), min(repeats, int(_CELL_S / slowest_s)))
        times[cell] = []
    for turn in range(repeats):
        for cell in calls if turn % 2 == 0 else reversed(calls):
            if turn < wanted[cell]:
                times[cell].append(clock.time(calls[cell]))
    order = list(ALGORITHMS)
    cells = sorted(calls, key=lambda cell: (order.index(cell[0]), cell[1]))
    return [_describe_cell(*cell, times[cell], nodes, links) for cell in cells]


def _describe_cell(
    name: str, num_bytes: int, times: Sequence[float], nodes: Sequence[int], links: Links
) -> Cell:
    taken, predicted_s = Spread.of(times), predict(name, num_bytes, nodes, links)
    factor = BUS_FACTORS.get(name)
    rate = None if factor is None else num_bytes / taken.median
    return Cell(
        operation=name,
        num_bytes=num_bytes,
        algorithm=ALGORITHMS[name][0],
        time_s=taken,
        algorithm_bytes_per_s=rate,
        bus_bytes_per_s=None if rate is None or factor is None else rate * factor(len(nodes)),
        predicted_s=predicted_s,
        error=predicted_s / taken.median - 1,
    )
