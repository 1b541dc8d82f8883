"""Ranks are killed inside of a step: a restart goes on from the step before, from the ranks that are left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import find_checkpoint, hash_stored, list_at, open_usable, verify
from tests.train.test_memory_saves import list_keepers

ROOT = Path(__file__).parent.parent.parent
NUM_STEPS, DISK_STEP, LOST_STEP = 9, 2, 6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def launch(folder: Path, layout: str, nproc: int, *words: Any) -> str:
    """Run to the end; return the output."""
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", str(nproc)]
    command += ["--max-restarts", "3", "--monitor-interval", "0.2", str(ROOT / "tests/train/lost_ranks.py")]
    command += [str(folder), layout, str(NUM_STEPS), str(DISK_STEP), *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=folder.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def read_hash(folder: Path) -> str:
    path = find_checkpoint(folder)
    assert path.name == f"step-{NUM_STEPS:08d}"
    return hash_stored(open_usable(path).model)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the hash at the end of a run that nothing disturbs, by layout."""

    @cache
    def run(layout: str, nproc: int) -> str:
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        launch(folder, layout, nproc)
        return read_hash(folder)

    return run


@pytest.mark.parametrize(
    ("layout", "nproc", "lost", "place", "first"),
    [
        ("dp_replicate=4", 4, "1", "forward", LOST_STEP - 1),
        ("dp_replicate=2", 2, "0", "forward", LOST_STEP - 1),  # it writes the metrics
        ("dp_replicate=2 dp_shard=2", 4, "2", "forward", LOST_STEP - 1),
        # Ranks 0 and 2 hold the same parts, and nobody else does.
        ("dp_replicate=2 dp_shard=2", 4, "0,2", "forward", DISK_STEP),
        ("dp_replicate=2", 2, "1", "update", DISK_STEP),
        # The other rank completes the step, and fails in the next one.
        ("dp_replicate=2", 2, "1", "update of one", LOST_STEP),
        # The state may be the cause of an error, which is not used to go on from.
        ("dp_replicate=2", 2, "1", "error", DISK_STEP),
    ],
)
def test_a_restart_goes_on_from_the_last_step_with_the_same_hash(
    tmp_path: Path, undisturbed: Any, layout: str, nproc: int, lost: str, place: str, first: int
) -> None:
    folder = tmp_path / "run"
    text = launch(folder, layout, nproc, lost, LOST_STEP, place)
    assert [int(step) for step in re.findall(r"from (\d+)", text)] == [0, first], text
    assert read_hash(folder) == undisturbed(layout, nproc)
    rows = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, NUM_STEPS + 1))
    assert all(verify(path) == [] for path in list_at(folder))
    assert ("kept that step in memory" in text) == (first != DISK_STEP)
    assert ("an error of its own" in text) == (place == "error")
    assert list_keepers(folder) == []


@pytest.mark.parametrize("option", ["track", "hook", "off"])
def test_a_restart_goes_on_from_the_disk_where_a_rank_holds_nothing(tmp_path: Path, option: str) -> None:
    text = launch(tmp_path / "run", "dp_replicate=2", 2, 1, LOST_STEP, "forward", option)
    assert [int(step) for step in re.findall(r"from (\d+)", text)] == [0, DISK_STEP], text
