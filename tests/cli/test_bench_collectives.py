"""`paceline bench collectives`: its options, its refusals and its report."""

from __future__ import annotations

import pytest

from paceline.bench.collectives import Cell, Collectives
from paceline.bench.spread import Spread
from paceline.cli.bench_collectives import describe_collectives, parse_sizes
from paceline.errors import PacelineError
from paceline.plan.call_sizes import BUS_FACTORS
from tests.cli.test_bench import run


def test_sizes_are_read_with_their_units() -> None:
    assert parse_sizes("1MB, 64,4kb,2 GB,64B") == [64, 4096, 1 << 20, 2 << 30]


@pytest.mark.parametrize("text", ["", "0", "-4", "4.5MB", "4TB", "64,,128", "five", "1e3", "5GB"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(PacelineError, match="PL620"):
        run("collectives", f"--sizes={text}")


@pytest.mark.parametrize(
    ("words", "code", "seen"),
    [
        (("--nproc", "1"), "PL622", "nproc=1"),
        (("--nproc", "0"), "PL620", "nproc=0"),
        (("--repeats", "0"), "PL620", "repeats=0"),
        (("--nproc", "100000"), "PL321", "100000"),
    ],
)
def test_refuses(words: tuple[str, ...], code: str, seen: str) -> None:
    with pytest.raises(PacelineError) as caught:
        run("collectives", *words)
    assert caught.value.code == code
    assert seen in str(caught.value)


def test_under_a_launcher_the_ranks_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PacelineError, match="PL601"):
        run("collectives", "--nproc", 2)


def test_prints_a_row_per_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("collectives", "--nproc", 2, "--sizes", "1KB", "--repeats", 1) == 0
    out = capsys.readouterr().out
    assert "collectives on 2 ranks of 1 node, gloo" in out
    rows = [line for line in out.splitlines() if " KiB " in line]
    assert [row.split()[0] for row in rows] == list(BUS_FACTORS)
    assert "misses" not in out, "one size has no others between"


def make_found() -> Collectives:
    cell = Cell("all_reduce", 1024, Spread.of([2e-3] * 6), 768e3, 3e-3)
    return Collectives((0, 1), ("host0", "host1"), "gloo", [cell], {"all_reduce": (1e-3, 5e8)}, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_prints_under_any_launcher(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "paceline.bench.collectives.measure_collectives", lambda *args, **kwargs: make_found()
    )
    for name, value in (("RANK", rank), ("SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_SIZE", 2)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    assert run("collectives") == 0
    assert ("collectives on 2 ranks" in capsys.readouterr().out) is (rank == 0)


def test_what_people_read() -> None:
    lines = describe_collectives(make_found()).splitlines()
    rows = [line.split() for line in lines if line.strip().startswith("all_reduce")]
    assert rows[0][-5:] == ["0.768", "MB/s", "3.0", "ms", "(+50%)"]
    assert rows[1] == ["all_reduce", "1.0", "ms", "500", "MB/s"]
    assert any("by 50% in the median; 0% are within 15%" in line for line in lines)
