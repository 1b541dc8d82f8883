"""Collectives on nodes with limited links: what crosses them, how long sizes that were not measured take."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.launching.nodes import Nodes, why_no_nodes

RUN = Path(__file__).parents[2] / "benchmarks" / "collectives" / "run.py"
REASON = why_no_nodes()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("collectives_run", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["collectives_run"] = module
    spec.loader.exec_module(module)
    return module


def cells_of(found: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """The cells by operation and size."""
    return {(cell["operation"], cell["num_bytes"]): cell for cell in found["cells"]}


def skip_without_limits() -> None:
    with Nodes(1) as nodes:
        try:
            nodes.limit(0, 100)
        except (RuntimeError, OSError) as error:
            pytest.skip(f"links cannot be limited here: {error}")


def test_a_size_between_takes_as_long_as_the_others_predict(bench: ModuleType) -> None:
    skip_without_limits()
    found = bench.measure(bench.Setting(3, 1, 100), "--sizes", "1MB,2MB,4MB", "--repeats", "3")
    assert found["nodes"] == [0, 1, 2]
    assert found["hosts"] == ["node0", "node1", "node2"]
    cells = cells_of(found)
    for operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "scatter"):
        # At 100 Mbit/s the link decides, however busy this machine is.
        (error,) = (each for (name, _), each in bench.find_errors(found).items() if name == operation)
        assert abs(error) < 0.15, cells
    reduced = [c for (name, _), c in cells.items() if name == "all_reduce"]
    assert reduced[1]["bus_bytes_per_s"] == pytest.approx(12.5e6, rel=0.2)


def test_a_long_link_costs_round_trips(bench: ModuleType) -> None:
    if not Path("/dev/net/tun").exists():
        pytest.skip("a long link needs /dev/net/tun")
    found = bench.measure(bench.Setting(4, 1, 100, 50), "--sizes", "64", "--repeats", "5")
    cells = cells_of(found)
    trips = {name: cells[name, 64]["time_s"]["median"] / 50e-3 for name in ("all_reduce", "all_gather")}
    assert trips == pytest.approx({"all_reduce": 6, "all_gather": 3}, rel=0.25)
