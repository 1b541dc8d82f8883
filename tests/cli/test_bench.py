from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import tomli_w

from paceline.cli import bench
from paceline.errors import PacelineError
from tests.bench.recipes import tiny_table

SCRIPT = Path(__file__).parents[1] / "bench" / "scripts" / "train.py"


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


def test_scaling_prints_a_table(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("scaling", recipe, "--nproc", 2, "--steps", 1, "--repeats", 1) == 0
    out = capsys.readouterr().out
    assert "strong: the same 6 samples of a step, shared out" in out
    assert "1 thread per rank everywhere" in out
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit() and " reach " not in line]
    assert [row[0] for row in rows] == ["1", "2"]


def test_overhead_of_a_script_prints_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nproc", 2, "--steps", 1, "--repeats", 1, "--json", "--", "--kind", "accumulating")
    assert run("overhead", SCRIPT, *words) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["num_ranks"] == 2
    assert table["num_parameters"] == 4225
    assert table["samples_per_step"] == 60
    assert table["ways"]["alone"]["ratio"]["num_values"] == 1


@pytest.mark.slow
def test_buckets_and_threads_of_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nproc", 2, "--steps", 2, "--repeats", 1)
    assert run("buckets", SCRIPT, *words, "--sizes", "0.01,25") == 0
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines() if " ms" in row] == ["0.01", "25"]
    assert run("dp", SCRIPT, *words) == 0
    out = capsys.readouterr().out
    assert "20 samples per step" in out
    assert "2 threads, 1 process" in out
    with pytest.raises(PacelineError, match="PL957"):
        run("dp", SCRIPT, *words, "--", "--kind", "by-hand")


def test_what_belongs_to_recipes_is_refused_for_scripts(tmp_path: Path) -> None:
    for words in (("--set", "train.steps=3"), ("--weak",)):
        with pytest.raises(PacelineError, match=f"{words[0]} with a script.*PL601"):
            run("scaling", SCRIPT, *words)
    with pytest.raises(PacelineError, match=r"--epochs 3 after a recipe.*PL601"):
        run("scaling", tmp_path / "recipe.toml", "--", "--epochs", 3)
    with pytest.raises(PacelineError, match=r"nowhere\.py does not exist.*PL340"):
        run("scaling", tmp_path / "nowhere.py")


@pytest.mark.parametrize(
    ("words", "code", "seen"),
    [
        (("--nproc", "0"), "PL620", "nproc=0"),
        (("--steps", "0", "--nproc", "1"), "PL620", "steps=0"),
        (("--repeats", "-1", "--nproc", "1"), "PL620", "repeats=-1"),
        (("--ranks", "1,two"), "PL620", "1,two"),
        (("--ranks", "1,2", "--nproc", "2"), "PL620", "--nproc 2"),
        (("--ranks", "1,0"), "PL620", "=0"),
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
