"""Streams, limits and folders that a shell gives a command: full, closed, of another encoding, gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_bad_input import check_told, fill, snapshot

TRAIN = ["train", "recipe.toml", "--out", "out"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


def shell(folder: Path, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `$paceline` is the command."""
    variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=variables | {"OMP_NUM_THREADS": "1", "paceline": f"{sys.executable} -m paceline"} | environ,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=300,
        check=False,
    )


def test_full_output_is_reported_before_anything_is_trained(folder: Path) -> None:
    before = snapshot(folder)
    done = shell(folder, f"$paceline {' '.join(TRAIN)} >/dev/full")
    check_told(done, ["standard output", "No space left", "PL603"])
    assert {k: v for k, v in snapshot(folder).items() if not k.startswith("cache")} == before


def test_output_and_errors_both_full(folder: Path) -> None:
    assert shell(folder, "$paceline explain PL100 >/dev/full 2>/dev/full").returncode == 2


@pytest.mark.parametrize("closing", [">&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_as_if_nobody_listens(closing: str, folder: Path) -> None:
    done = shell(folder, f"$paceline checkpoint show nothing {closing}")
    assert done.returncode == 2
    assert done.stdout == ""
    assert ("PL514" in done.stderr) == ("2>&-" not in closing)
    assert shell(folder, f"$paceline explain PL100 {closing}").returncode == 0


def test_a_working_folder_that_is_gone(folder: Path) -> None:
    script = "p=$(realpath ..); mkdir gone; cd gone; rmdir ../gone; $paceline train ../recipe.toml"
    check_told(shell(folder, script), ["working folder", "cd ~", "PL604"])


def test_few_open_files_for_a_script(folder: Path) -> None:
    (folder / "hello.py").write_text("print('hello')\n")
    done = shell(folder, "ulimit -n 20; $paceline run --nproc-per-node 2 hello.py")
    check_told(done, ["open files", "ulimit -n", "PL605"])


@pytest.mark.parametrize("limit", [20, 40])
def test_few_open_files(limit: int, folder: Path) -> None:
    done = shell(folder, f"ulimit -n {limit}; $paceline {' '.join(TRAIN)}")
    check_told(done, [f"{limit} open files", "ulimit -n", "PL605"])
