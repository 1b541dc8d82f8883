"""Measures a cluster on its running ranks, for `paceline plan --cluster cluster.toml`; about a minute.

Protocol, the same on every rank; all ranks measure at the same time, because they share cores, memory and
links in training too:

1. Matrix products and attention over a grid of shapes and types; then a copy beyond the caches, and a tiny
   block forward and backward, which shows the cost of starting an operation.
2. All-reduce, all-gather, reduce-scatter and all-to-all: over the ranks of each node, then over ranks of
   different nodes. Calls of a size follow each other, and the slowest rank counts. A line through the sizes
   gives the seconds of an empty call and the bus bandwidth (nccl-tests, doc/PERFORMANCE.md).
3. Steps of a model of 64 parameters: what a step takes beside its arithmetic.

The median over repetitions counts, of the slowest rank.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from paceline.bench.collectives import build_calls
from paceline.comm.nodes import find_nodes
from paceline.launching.local import launch
from paceline.memory.limits import Gauge
from paceline.mesh import build_mesh
from paceline.models.gpt import GptBlock
from paceline.parallel.sums.gradient_sum import sum_rows
from paceline.plan.call_sizes import BUS_FACTORS, fit_line
from paceline.plan.cluster import MeasuredProduct
from paceline.plan.costs import BLOCK_CALLS
from paceline.recipe.layout import Layout
from paceline.recipe.schema import GptModel
from paceline.train.trainer import Trainer
from paceline.world import World, start

_DTYPES = (torch.float32, torch.bfloat16)
_ROWS, _WIDTHS = (64, 512, 4096), (64, 256, 1024, 4096)
_TOKENS, _HEADS, _NUM_HEADS = (128, 1024), (16, 64, 128), 8
# A product of more operations would take seconds on a core.
_MOST_FLOPS = {"cpu": 4e9, "cuda": 1e13}
_SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_SAMPLE_S, _MOST_CALLS = 0.02, 10_000
_REPEATS = 5
# Beyond the caches of most processors, with the other ranks.
_COPY_BYTES = 64 << 20
_STEPS = 12
# Quartiles of the same work this far apart are a busy machine.
_BUSY = 1.3


@dataclass(frozen=True)
class ProbedClass:
    """The links of a class: a line for messages, and one for each collective."""

    ranks: int
    alpha_s: float
    bytes_per_s: float
    calls: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class ProbedCluster:
    """A measured cluster; the fields are those of `cluster.toml`."""

    hosts: tuple[str, ...]
    ranks_per_node: int
    processor: str
    memory_bytes: float
    memory_bytes_per_s: float
    call_s: float
    products: list[MeasuredProduct]
    attention: list[MeasuredProduct]
    inside: ProbedClass | None
    between: ProbedClass | None
    other_s: float
    remarks: tuple[str, ...]
    took_s: float


def measure_cluster(num_ranks: int | None, *, device: str = "auto") -> ProbedCluster:
    """Measure the cluster of the running ranks, or of ranks that are started on this machine.

    Args:
        num_ranks: ranks to start; None in a process that is a rank, as all of them must be then.
        device: as for `start`.
    """
    if num_ranks is None:
        return _run(device)
    found: list[ProbedCluster] = launch(_run, num_ranks, (device,), hang_after_s=None)
    return found[0]


def _run(device: str) -> ProbedCluster:
    begin_s = time.perf_counter()
    # A trainer pins its threads, too: several per core wait for each other in every product.
    with start(device=device, threads_per_rank=1) as world:
        hosts, nodes = find_nodes() if world.world_size > 1 else (("localhost",), (0,))
        per_node = min(nodes.count(node) for node in set(nodes))
        spreads: list[float] = []
        products = _measure_products(world, spreads)
        attention = _measure_attention(world, spreads)
        copy_s = _median(world, _time(world, _copy(world)), spreads)
        # Backward starts twice as many, in plans.
        call_s = _median(world, _time(world, _run_block(world)), spreads) / (3 * BLOCK_CALLS)
        classes = _measure_classes(world, len(hosts), per_node)
        other_s = _measure_step(world)
        remarks = list(_list_remarks(spreads, nodes))
        return ProbedCluster(
            hosts=tuple(hosts),
            ranks_per_node=per_node,
            processor=_name_processor(world.device),
            memory_bytes=_find_memory(world, per_node),
            memory_bytes_per_s=2 * _COPY_BYTES / copy_s,
            call_s=call_s,
            products=products,
            attention=attention,
            inside=classes["inside"],
            between=classes["between"],
            other_s=other_s,
            remarks=tuple(remarks),
            took_s=time.perf_counter() - begin_s,
        )


def _list_remarks(spreads: list[float], nodes: Sequence[int]) -> Iterator[str]:
    if len({nodes.count(node) for node in nodes}) > 1:
        yield "nodes have different numbers of ranks; the smallest number is planned for"
    spread = statistics.median(spreads)
    if spread > _BUSY:
        yield f"the machine was busy: the same work took up to {spread:.1f} times as long in another quarter"


# ---- one rank


def _measure_products(world: World, spreads: list[float]) -> list[MeasuredProduct]:
    kind, found = world.device.type, []
    for dtype, rows, inner, columns in itertools.product(_DTYPES, _ROWS, _WIDTHS, _WIDTHS):
        flops = 2.0 * rows * inner * columns
        if flops > _MOST_FLOPS[kind]:
            continue
        left = torch.randn(rows, inner, device=world.device, dtype=dtype)
        right = torch.randn(columns, inner, device=world.device, dtype=dtype)
        call = partial(nn.functional.linear, left, right)
        took_s = _median(world, _time(world, call, repeats=3), spreads)
        found.append((float(rows), float(inner), float(columns), dtype.itemsize, flops / took_s))
    return found


def _measure_attention(world: World, spreads: list[float]) -> list[MeasuredProduct]:
    found = []
    for dtype, tokens, width in itertools.product(_DTYPES, _TOKENS, _HEADS):
        one = torch.randn(1, _NUM_HEADS, tokens, width, device=world.device, dtype=dtype)
        call = partial(nn.functional.scaled_dot_product_attention, one, one, one, is_causal=True)
        flops = 2.0 * _NUM_HEADS * tokens**2 * width  # half of two products
        took_s = _median(world, _time(world, call, repeats=3), spreads)
        found.append((float(tokens), float(width), float(tokens), dtype.itemsize, flops / took_s))
    return found


def _copy(world: World) -> Callable[[], object]:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=world.device)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def _run_block(world: World) -> Callable[[], object]:
    block = GptBlock(GptModel(kind="gpt", layers=1, hidden=16, heads=2)).to(world.device)
    x, angles = torch.ones(1, 4, 16, device=world.device), torch.ones(4, 8, device=world.device)
    return lambda: block(x, angles, angles).sum().backward()


def _time(world: World, call: Callable[[], object], repeats: int = _REPEATS) -> list[float]:
    """Return the seconds of a call, repeated as often as a sample lasts; all ranks begin together."""
    # The first call allocates, and a short sample would show whether the rank was interrupted.
    once_s = min(_run_often(world, call, 1) for _ in range(3))
    times = max(1, min(_MOST_CALLS, int(_agree(world, _SAMPLE_S / max(once_s, 1e-7)))))
    return [_run_often(world, call, times) for _ in range(repeats)]


def _run_often(world: World, call: Callable[[], object], times: int) -> float:
    if world.world_size > 1:
        dist.barrier()
    world.wait_for_device()
    begin_s = time.perf_counter()
    for _ in range(times):
        call()
    world.wait_for_device()
    return (time.perf_counter() - begin_s) / times


def _agree(world: World, value: float) -> float:
    """Return the largest value of all ranks."""
    found = torch.tensor(value, dtype=torch.float64)
    if world.world_size > 1:
        found = found.to(world.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())


def _median(world: World, times: list[float], spreads: list[float]) -> float:
    """Return the slowest rank's median time, and note the spread of this rank's.

    Of ranks that share cores, the first to end leaves them to the others.
    """
    quarters = statistics.quantiles(times, n=4)
    spreads.append(quarters[2] / quarters[0])
    return _agree(world, statistics.median(times))


def _name_processor(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _find_memory(world: World, per_node: int) -> float:
    """Return the bytes that one rank may use."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    use = Gauge().read_fullest()
    return (use.limit - use.used) / per_node


# ---- several ranks


def _measure_classes(world: World, num_nodes: int, per_node: int) -> dict[str, ProbedClass | None]:
    found: dict[str, ProbedClass | None] = {"inside": None, "between": None}
    if world.world_size != num_nodes * per_node or world.world_size == 1:
        return found
    mesh = build_mesh(Layout(dp_replicate=num_nodes, tp=per_node), world)
    for name, axis in (("inside", mesh.tp), ("between", mesh.dp_replicate)):
        if axis.size > 1:
            found[name] = _measure_class(world, axis.group, axis.size)
    return found


def _measure_class(world: World, group: dist.ProcessGroup, size: int) -> ProbedClass:
    calls = {}
    for operation in _OPERATIONS:
        seconds = {}
        for num_bytes in _SIZES:
            _, built = build_calls(num_bytes, size, world.rank, world.device, group)
            row = torch.zeros(-(-num_bytes // (4 * size)), device=world.device)
            built["reduce_scatter"] = partial(sum_rows, row, row.repeat(size), group)  # as training does
            taken = _time(world, built[operation])
            seconds[num_bytes] = _agree(world, statistics.median(taken))
        calls[operation] = fit_line(seconds, BUS_FACTORS[operation](size))
    # A message of a pipeline: the steps of a ring without the factor.
    empty_s, rate = calls["all_gather"]
    return ProbedClass(size, empty_s / max(1, size - 1), rate, calls)


def _measure_step(world: World) -> float:
    """Return the usual seconds of a step of a model that computes almost nothing."""
    trainer = Trainer(
        nn.Linear(8, 8, bias=False),
        loss=lambda output, _: output.square().mean(),
        forward=lambda model, batch: model(batch["x"]),
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named]),
    )
    taken = []
    for number in range(_STEPS):
        x = torch.full((1, 8), 1.0 + world.rank + world.world_size * number)
        begin_s = time.perf_counter()
        float(trainer.step({"x": x}).loss)
        taken.append(time.perf_counter() - begin_s)
    return _agree(world, statistics.median(taken[2:]))
