from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import tomli_w

from paceline.cli import bench
from paceline.errors import PacelineError
from tests.bench.recipes import tiny_table


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    bench.register(parser.add_subparsers())
    args = parser.parse_args(["bench", *map(str, words)])
    code: int = args.run(args)
    return code


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(tomli_w.dumps(tiny_table(tmp_path)))
    return path


def test_scaling_prints_a_table_and_draws(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = recipe.parent / "scaling.svg"
    assert run("scaling", recipe, "--nproc", 2, "--steps", 1, "--repeats", 1, "--plot", picture) == 0
    out = capsys.readouterr().out
    assert "the same global batch of 6 samples, shared out" in out
    assert "1 thread per rank everywhere" in out
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2"]
    assert "█" in out
    assert picture.read_text().lstrip().startswith("<?xml")


def test_overhead_prints_json_alone(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nproc", 2, "--steps", 1, "--repeats", 1, "--set", "model.hidden=8", "--json")
    assert run("overhead", recipe, *words) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["num_ranks"] == 2
    assert table["num_parameters"] < 4000
    assert table["comm_share"]["num_values"] == 1


@pytest.mark.parametrize(
    ("words", "code", "seen"),
    [
        (("--nproc", "0"), "PL620", "nproc=0"),
        (("--steps", "0", "--nproc", "1"), "PL620", "steps=0"),
        (("--repeats", "-1", "--nproc", "1"), "PL620", "repeats=-1"),
        (("--ranks", "1,two"), "PL626", "1,two"),
        (("--ranks", "1,2", "--nproc", "2"), "PL626", "--nproc 2"),
        (("--ranks", "1,0"), "PL620", "=0"),
        (("--plot", "scaling.txt"), "PL623", "scaling.txt"),
        (("--plot", "nowhere/scaling.png"), "PL625", "nowhere"),
        (("--set", "model.hiden=3"), "PL100", "hiden"),
        (("--nproc", "100000"), "PL321", "100000"),
    ],
)
def test_scaling_refuses(recipe: Path, words: tuple[str, ...], code: str, seen: str) -> None:
    with pytest.raises(PacelineError) as caught:
        run("scaling", recipe, *words)
    assert caught.value.code == code
    assert seen in str(caught.value)


def test_overhead_refuses_one_rank(recipe: Path) -> None:
    with pytest.raises(PacelineError, match="PL622"):
        run("overhead", recipe, "--nproc", 1)


def test_picture_without_matplotlib_is_reported_before_measuring(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(PacelineError, match=r"pip install matplotlib.*PL624"):
        run("scaling", recipe, "--plot", recipe.parent / "scaling.png")
