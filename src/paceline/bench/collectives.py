"""Measures collectives on the running ranks beside their prediction from one ring's messages.

A barrier precedes each call, and the slowest rank counts, as in nccl-tests. Calls of all kinds and sizes
alternate, in turns of opposite order, so that a machine that slows down affects all.

A prediction is `call + steps * step + bytes / rate` (Hockney 1994). The step and the rate are those of a ring
over all ranks, in which each sends to the next one and receives from the one before; so they are those of its
slowest link. Steps and bytes of the operations are those of Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH", and of gloo's sources where they differ.

Algorithm bandwidth is size / time, and bus bandwidth that times the operation's factor, as nccl-tests define
them (doc/PERFORMANCE.md). Sizes are those of `paceline.plan.calls`, and rank 0 is the root.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.bench.spread import Spread
from paceline.comm.collectives import all_gather, reduce_scatter
from paceline.comm.nodes import find_nodes
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
_SMALL_BYTES, _LARGE_BYTES = 64, 4 << 20
# The first rounds are not counted: over a long link, TCP sends little until its window has grown.
_SMALL_ROUNDS, _LARGE_ROUNDS, _GROWING = 50, 5, 3


@dataclass(frozen=True)
class Algorithm:
    """The algorithm by which gloo carries out an operation; it has no other choice.

    Attributes:
        name: the usual one.
        steps: of N ranks, messages that follow each other.
        sent: of N ranks, what the busiest one sends, in sizes of the call.
    """

    name: str
    steps: Callable[[int], int]
    sent: Callable[[int], float]


def _depth(num_ranks: int) -> int:
    return math.ceil(math.log2(num_ranks))


ALGORITHMS = {
    "all_reduce": Algorithm("ring", lambda n: 2 * (n - 1), BUS_FACTORS["all_reduce"]),
    "reduce_scatter": Algorithm("by-all-reduce", lambda n: 2 * (n - 1), BUS_FACTORS["all_reduce"]),
    "all_gather": Algorithm("ring", lambda n: n - 1, BUS_FACTORS["all_gather"]),
    "broadcast": Algorithm("tree", _depth, _depth),
    "reduce": Algorithm("ring", lambda n: n, BUS_FACTORS["all_reduce"]),
    "gather": Algorithm("direct", lambda n: 1, BUS_FACTORS["gather"]),
    "scatter": Algorithm("direct", lambda n: 1, BUS_FACTORS["scatter"]),
    "all_to_all": Algorithm("direct", lambda n: 1, BUS_FACTORS["all_to_all"]),
    "barrier": Algorithm("dissemination", _depth, lambda n: 0.0),
}


@dataclass(frozen=True)
class Ring:
    """The messages of a ring over all ranks.

    Attributes:
        call_s: seconds of a call beside its messages.
        step_s: seconds in which all ranks pass on a small message.
        bytes_per_s: that each rank sends while it receives as many.
    """

    call_s: float
    step_s: float
    bytes_per_s: float


def predict(operation: str, num_bytes: float, num_ranks: int, ring: Ring) -> float:
    """Return the seconds of a call, from a barrier to the slowest rank's end."""
    algorithm = ALGORITHMS[operation]
    sent = algorithm.sent(num_ranks) * num_bytes
    return ring.call_s + algorithm.steps(num_ranks) * ring.step_s + sent / ring.bytes_per_s


@dataclass(frozen=True)
class Cell:
    """An operation with a size.

    Attributes:
        operation: as torch.distributed calls it.
        num_bytes: the size; 0 for a barrier.
        algorithm: that gloo runs.
        time_s: from a barrier to the slowest rank's end.
        algorithm_bytes_per_s: size over median time; None for a barrier.
        bus_bytes_per_s: that times the operation's factor; None for a barrier.
        predicted_s: from the ring alone.
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
        ring: that the predictions use.
        cells: by operation and size.
        median_error: of the cells' absolute errors.
        near_share: share of cells with an absolute error of at most 25%.
        num_cores: cores that rank 0 may use.
    """

    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    backend: str
    ring: Ring
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
        PacelineError: PL320 to PL326 for ranks that cannot be started.
    """
    args = (tuple(sizes), repeats)
    if num_ranks is None:
        return _run(*args)
    check_launch(num_ranks, "cpu")
    found: list[Collectives] = launch(_run, num_ranks, args, device="cpu", hang_after_s=None)
    return found[0]


def _run(sizes: Sequence[int], repeats: int) -> Collectives:
    with start(device="cpu", threads_per_rank=1) as world:
        hosts, nodes = find_nodes()
        ring = _measure_ring(world)
        cells = _measure_cells(world, ring, sizes, repeats)
        errors = [abs(cell.error) for cell in cells]
        return Collectives(
            nodes=nodes,
            hosts=hosts,
            backend=world.backend,
            ring=ring,
            cells=cells,
            median_error=statistics.median(errors),
            near_share=sum(error <= NEAR for error in errors) / len(errors),
            num_cores=usable_cores(),
        )


def _time(call: Callable[[], object]) -> float:
    """Return the seconds of a call after a barrier, on the slowest rank."""
    dist.barrier()
    began_s = time.perf_counter()
    call()
    return _find_slowest(time.perf_counter() - began_s)


def _find_slowest(seconds: float) -> float:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.item())


def _measure_ring(world: World) -> Ring:
    """Measure a ring over all ranks, on all of them; the slowest rank counts."""
    num_ranks = world.world_size
    after, before = (world.rank + 1) % num_ranks, (world.rank - 1) % num_ranks

    def pass_on(num_bytes: int, rounds: int) -> float:
        # Ones: new zeros would all be one page of the system's, which stays in the cache.
        sent, received = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
        taken = []
        dist.barrier()
        for _ in range(_GROWING + rounds):
            began_s = time.perf_counter()
            for work in (dist.irecv(received, before), dist.isend(sent, after)):
                assert work is not None
                work.wait()
            taken.append(time.perf_counter() - began_s)
        return _find_slowest(statistics.median(taken[_GROWING:]))

    large_s = pass_on(_LARGE_BYTES, _LARGE_ROUNDS)
    step_s = pass_on(_SMALL_BYTES, _SMALL_ROUNDS)
    rate = (_LARGE_BYTES - _SMALL_BYTES) / max(large_s - step_s, 1e-9)
    # A call that stands alone wakes threads and cores that sleep; the messages above follow each other.
    # A busy machine wakes ranks late: the lower quartile.
    barrier_s = statistics.quantiles([_time(dist.barrier) for _ in range(_SMALL_ROUNDS)], n=4)[0]
    return Ring(max(0.0, barrier_s - _depth(num_ranks) * step_s), step_s, rate)


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


def _measure_cells(world: World, ring: Ring, sizes: Sequence[int], repeats: int) -> list[Cell]:
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
    order = list(ALGORITHMS)
    cells = sorted(calls, key=lambda cell: (order.index(cell[0]), cell[1]))
    return [_describe_cell(*cell, times[cell], world.world_size, ring) for cell in cells]


def _describe_cell(name: str, num_bytes: int, times: Sequence[float], num_ranks: int, ring: Ring) -> Cell:
    taken, predicted_s = Spread.of(times), predict(name, num_bytes, num_ranks, ring)
    factor = BUS_FACTORS.get(name)
    rate = None if factor is None else num_bytes / taken.median
    return Cell(
        operation=name,
        num_bytes=num_bytes,
        algorithm=ALGORITHMS[name].name,
        time_s=taken,
        algorithm_bytes_per_s=rate,
        bus_bytes_per_s=None if rate is None or factor is None else rate * factor(num_ranks),
        predicted_s=predicted_s,
        error=predicted_s / taken.median - 1,
    )
