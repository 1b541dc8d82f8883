"""`paceline probe` on real ranks: the file that it writes can be planned for."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.bench import probe
from paceline.bench.probe import ProbedClass, ProbedCluster, measure_cluster
from paceline.cli.probe import _write, format_probe
from paceline.errors import PacelineError
from paceline.plan.call_sizes import fit_line
from paceline.plan.cluster import read_file
from paceline.plan.fit import load_constants
from paceline.plan.recipe_costs import of_recipe
from paceline.plan.search import search
from paceline.recipe import Rules, load_recipe

LINKS = ProbedClass(2, 1e-4, 1e9, {"all_reduce": (2e-4, 2e9), "all_gather": (1e-4, 1e9)})
PROBE = ProbedCluster(
    ("a", "b"), 2, "cpu", 1e10, 1e10, 1e-5, [(64.0, 64.0, 64.0, 4, 1e10)], [(128.0, 16.0, 128.0, 4, 1e9)],
    LINKS, replace(LINKS, bytes_per_s=1e8), 0.01, ("the machine was busy",), 12.0,
)  # fmt: skip


def test_the_file_says_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    _write(path, list(format_probe(PROBE)))
    assert tomllib.loads(path.read_text())["between"]["bytes_per_s"] == 1e8
    found = read_file(path)
    assert (found.nodes, found.ranks_per_node, found.is_probed) == (2, 2, True)
    assert found.processor.measured == tuple(PROBE.products)
    assert found.processor.attention == tuple(PROBE.attention)
    assert found.inside is not None
    assert found.inside.calls["all_reduce"] == (2e-4, 2e9)
    assert found.remarks == ("the machine was busy",)
    assert found.step_s == 0.01
    # Two ranks: the empty call, and 2 (N - 1) / N = 1 times the bytes.
    assert found.time("all_reduce", 2e9, 2) == pytest.approx(1 + 2e-4)


def test_an_interrupted_probe_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    _write(path, list(format_probe(PROBE))[:-1])
    with pytest.raises(PacelineError) as found:
        read_file(path)
    assert found.value.code == "PL933"
    assert "did not finish" in str(found.value)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PacelineError) as found:
        _write(tmp_path / "no" / "cluster.toml", [])
    assert found.value.code == "PL937"


def test_a_line_through_measured_sizes() -> None:
    seconds = {size: 1e-4 + size * 1e-9 for size in (1 << 20, 4096, 65536)}
    empty_s, rate = fit_line(seconds, 0.5)
    assert (empty_s, rate) == (pytest.approx(1e-4), pytest.approx(0.5e9))


@pytest.mark.slow
def test_real_ranks_are_measured_and_planned_for(tmp_path: Path) -> None:
    found = measure_cluster(2, device="cpu")
    assert found.inside is not None
    assert set(found.inside.calls) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert all(1e7 < rate < 1e13 for *_, rate in found.products + found.attention)
    path = tmp_path / "cluster.toml"
    _write(path, list(format_probe(found)))
    recipe = load_recipe("recipes/gpt-stdlib.toml", [])
    plan = search(of_recipe(recipe), Rules.of(recipe), read_file(path), load_constants())
    assert 1e-3 < plan.fitting[0].seconds < 10


def test_products_have_as_many_threads_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(*_: object) -> None:
        seen.append(torch.get_num_threads())
        raise RuntimeError("enough")

    monkeypatch.setattr(probe, "_measure_products", note)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="enough"):
            measure_cluster(None, device="cpu")
    finally:
        torch.set_num_threads(before)
    assert seen == [1]
