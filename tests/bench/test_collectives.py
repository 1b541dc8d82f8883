"""Measured collectives."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

from paceline.bench.collectives import build_calls, measure_collectives, summarise
from paceline.plan.call_sizes import BUS_FACTORS
from paceline.world import World
from tests.dist.pool import Pool


@pytest.mark.slow
def test_measures_all_operations_on_real_ranks() -> None:
    found = measure_collectives(2, sizes=(64, 4096, 65536), repeats=3)
    assert found.nodes == (0, 0)
    assert [(cell.operation, cell.num_bytes) for cell in found.cells] == [
        *((name, size) for name in BUS_FACTORS for size in (64, 4096, 65536)),
        ("barrier", 0),
    ]
    for cell in found.cells:
        assert cell.time_s.num_values == 3
        assert 1e-6 < cell.time_s.low <= cell.time_s.median < 10
    cells = {(cell.operation, cell.num_bytes): cell for cell in found.cells}
    reduced, gathered = cells["all_reduce", 65536], cells["all_gather", 65536]
    assert reduced.bus_bytes_per_s == pytest.approx(65536 / reduced.time_s.median), "2 (N-1)/N is 1"
    assert gathered.bus_bytes_per_s == pytest.approx(65536 / gathered.time_s.median / 2)
    assert cells["barrier", 0].bus_bytes_per_s is None
    assert {cell.num_bytes for cell in found.cells if cell.predicted_s is not None} == {4096}
    assert set(found.lines) == set(BUS_FACTORS)
    json.dumps(asdict(found))


def test_sizes_between_are_predicted_from_the_smallest_and_the_largest() -> None:
    """On 4 ranks with a latency of 2 ms and 100 MB/s; the middle size takes a tenth longer than its line."""
    seconds = {size: 2e-3 + 1.5 * size / 1e8 for size in (64, 65536, 1 << 20)}
    times = {("all_reduce", size): [taken] for size, taken in seconds.items()}
    times |= {("all_reduce", 65536): [1.1 * seconds[65536]], ("barrier", 0): [1e-3]}
    cells, lines = summarise(times, 4)
    assert lines == {"all_reduce": (pytest.approx(2e-3), pytest.approx(1e8))}
    assert [cell.predicted_s for cell in cells] == [None, pytest.approx(seconds[65536]), None, None]
    assert cells[1].error == pytest.approx(1 / 1.1 - 1)


def run_calls(world: World) -> dict[str, list[float]]:
    """Return the result of each call, if rank r's numbers are r + 1."""
    num_bytes, calls = build_calls(10, world.world_size, world.rank)
    assert num_bytes == 12, "rounded up to a number for each rank"
    results: dict[str, list[float]] = {}
    for name, call in calls.items():
        tensors = [cell.cell_contents for cell in call.__closure__ or ()]  # type: ignore[attr-defined]
        for tensor in tensors:
            for part in tensor if isinstance(tensor, list) else [tensor]:
                if isinstance(part, torch.Tensor):
                    part.fill_(world.rank + 1)
        call()
        results[name] = [
            value for tensor in tensors if isinstance(tensor, torch.Tensor) for value in tensor.tolist()
        ]
    dist.barrier()
    return results


def test_calls_are_the_operations_that_they_are_named_after(ranks: Pool) -> None:
    found = ranks.run(run_calls, nproc=3)
    assert [set(row["all_reduce"]) for row in found] == [{6.0}] * 3
    assert [set(row["broadcast"]) for row in found] == [{1.0}] * 3
    assert set(found[0]["reduce"]) == {6.0}
    for rank, row in enumerate(found):
        assert {1.0, 2.0, 3.0} <= set(row["all_gather"])
        assert 6.0 in row["reduce_scatter"]
        assert set(row["scatter"]) == {1.0}, rank
        assert {1.0, 2.0, 3.0} <= set(row["all_to_all"])
