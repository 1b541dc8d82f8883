"""`make gpu` without a GPU, on tiny models: it has to work when somebody has a card for ten minutes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.run import LIMIT_S, ROOT, Part, find_marked, list_parts, run_part, write_table


def list_for(device: str, ranks: int, folder: Path) -> list[Part]:
    args = argparse.Namespace(device=device, tiny=device == "cpu", ranks=ranks)
    return list(list_parts(args, folder))


def test_ten_parts_for_one_card_and_one_per_axis_for_several(tmp_path: Path) -> None:
    assert len(list_for("cuda", 1, tmp_path)) == 10
    assert [part.name for part in list_for("cuda", 2, tmp_path)[10:]] == [
        f"{axis} over 2 ranks" for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    ]


def test_a_part_that_hangs_or_fails_costs_its_own_limit_alone(tmp_path: Path) -> None:
    hangs = (sys.executable, "-c", "import time; print('{\"a\": 1}', flush=True); time.sleep(60)")
    log = tmp_path / "log"
    found = run_part(Part("hangs", 1.0, (hangs,)), LIMIT_S, tmp_path, log)
    assert found["ended"] == "over its limit of 1 s"
    assert found["seconds"] < 20
    fails = (sys.executable, "-c", "print('{\"a\": 1}'); raise SystemExit('no card')")
    failed = run_part(Part("fails", 20.0, (fails, hangs)), LIMIT_S, tmp_path, log)
    assert failed["ended"] == "exit code 1: no card"
    assert found["results"] == failed["results"] == [{"a": 1}]
    page = write_table([failed], "abc")
    assert "| fails | exit code 1: no card |" in page
    assert "- commit: abc" in page
    assert log.read_text().splitlines()[1:] == [
        '{"a": 1}',
        "",
        f"$ {' '.join(fails)}",
        '{"a": 1}',
        "no card",
        "",
    ]


@pytest.mark.parametrize(
    ("printed", "ended"),
    [
        ('{"hash": "a"} {"hash": "a"}', "ok"),
        ('{"hash": "a"} {"hash": "b"}', "hashes differ"),
        ('{"sha256": "a"} {"sha256": "b"}', "hashes differ"),
        ("nothing", "no hash"),
        ('{"hash": "a"} {"holds": false}', "a claim does not hold"),
    ],
)
def test_a_part_is_ok_only_if_what_it_shows_is(tmp_path: Path, printed: str, ended: str) -> None:
    says = (sys.executable, "-c", "import sys; print(sys.argv[1].replace('} ', '}\\n'))", printed)
    found = run_part(Part("says", 20.0, (says,), is_same=True), LIMIT_S, tmp_path, tmp_path / "log")
    assert found["ended"] == ended


def test_all_tests_that_are_marked_gpu_are_run(tmp_path: Path) -> None:
    assert find_marked()
    marked = next(part for part in list_for("cuda", 1, tmp_path) if part.name == "tests marked gpu")
    [command] = marked.commands
    assert all((ROOT / path).exists() for path in command if path.startswith("tests/"))


@pytest.mark.parametrize(
    "only", ["claims", pytest.param("", marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_it_runs_without_a_gpu(tmp_path: Path, only: str) -> None:
    command = [sys.executable, "benchmarks/gpu/run.py", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--only", only], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert '"holds": false' not in done.stdout
    assert (tmp_path / "gpu.md").read_text().count("| ok |") == (1 if only else 10)
