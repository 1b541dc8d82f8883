"""Collectives measured beside their prediction."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.bench.collectives import build_calls, measure_collectives
from paceline.comm.links_file import save_links
from paceline.errors import PacelineError
from paceline.plan.collectives import GLOO_ALGORITHMS, predict
from paceline.plan.links_file import read_links
from paceline.world import World
from tests.comm.measured import make_links
from tests.dist.pool import Pool


@pytest.mark.slow
def test_measures_all_operations_on_real_ranks(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    found = measure_collectives(2, sizes=(64, 65536), repeats=3, save_to=path)
    assert found.nodes == (0, 0)
    assert [(cell.operation, cell.num_bytes) for cell in found.cells if cell.is_gloo] == [
        *((name, size) for name in GLOO_ALGORITHMS if name != "barrier" for size in (64, 65536)),
        ("barrier", 0),
    ]
    for cell in found.cells:
        assert cell.time_s.num_values == 3
        assert 1e-6 < cell.time_s.low <= cell.time_s.median < 10
        assert cell.error == pytest.approx(cell.predicted_s / cell.time_s.median - 1)
        predicted = predict(cell.operation, cell.num_bytes, (0, 0), found.links.links, cell.algorithm)
        assert cell.predicted_s == predicted.time_s
    own = [(cell.operation, cell.algorithm) for cell in found.cells if not cell.is_gloo]
    assert own == [
        *[("all_reduce", "direct")] * 2,
        *[("reduce_scatter", "direct")] * 2,
        *[("broadcast", "pipeline")] * 2,
    ]
    cells = {(cell.operation, cell.num_bytes): cell for cell in found.cells if cell.is_gloo}
    reduced, gathered = cells["all_reduce", 65536], cells["all_gather", 65536]
    assert reduced.algorithm_bytes_per_s == pytest.approx(65536 / reduced.time_s.median)
    assert reduced.bus_bytes_per_s == pytest.approx(65536 / reduced.time_s.median), "2 (N-1)/N is 1"
    assert gathered.bus_bytes_per_s == pytest.approx(65536 / gathered.time_s.median / 2)
    assert cells["barrier", 0].bus_bytes_per_s is None
    errors = sorted(abs(cell.error) for cell in found.cells)
    assert errors[0] <= found.median_error <= errors[-1]
    assert found.near_share == sum(error <= 0.25 for error in errors) / len(errors)
    assert read_links(path) == found.links
    json.dumps(asdict(found))


def test_links_of_another_cluster_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    save_links(make_links((0, 0)), path)
    with pytest.raises(PacelineError, match=r"host0.*PL951"):
        measure_collectives(2, sizes=(64,), repeats=1, links_file=path)


def run_calls(world: World) -> dict[str, list[float]]:
    """Return the result of each call, if rank r's numbers are r + 1."""
    num_bytes, calls = build_calls(10, world.world_size, world.rank)
    assert num_bytes == 12, "rounded up to a number for each rank"
    results: dict[str, list[float]] = {}
    for (name, algorithm), call in calls.items():
        tensors = [cell.cell_contents for cell in call.__closure__ or ()]  # type: ignore[attr-defined]
        for tensor in tensors:
            for part in tensor if isinstance(tensor, list) else [tensor]:
                if isinstance(part, torch.Tensor):
                    part.fill_(world.rank + 1)
        call()
        results[f"{name} {algorithm}"] = [
            value for tensor in tensors if isinstance(tensor, torch.Tensor) for value in tensor.tolist()
        ]
    dist.barrier()
    return results


def test_calls_are_the_operations_that_they_are_named_after(ranks: Pool) -> None:
    found = ranks.run(run_calls, nproc=3)
    for name in ("all_reduce ring", "all_reduce direct"):
        assert [set(row[name]) for row in found] == [{6.0}] * 3
    for name in ("broadcast tree", "broadcast pipeline"):
        assert [set(row[name]) for row in found] == [{1.0}] * 3
    assert set(found[0]["reduce ring"]) == {6.0}
    for rank, row in enumerate(found):
        assert {1.0, 2.0, 3.0} <= set(row["all_gather ring"])
        assert 6.0 in row["reduce_scatter by-all-reduce"]
        assert 6.0 in row["reduce_scatter direct"]
        assert set(row["scatter direct"]) == {1.0}, rank
        assert {1.0, 2.0, 3.0} <= set(row["all_to_all direct"])
