"""States in memory: a restarted run goes on from the newest one, unless it was altered or cannot be used."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from paceline.checkpoint import CheckpointFolder, list_at, verify
from paceline.checkpoint.content import full
from paceline.checkpoint.memory_copies import CopyTarget
from paceline.checkpoint.memory_keeper import MARKER, KeeperProcess
from paceline.errors import PacelineError
from paceline.train.state import memory_saves
from paceline.train.state.disks import Disks, SharedDisk
from paceline.train.state.memory_restore import put_failed_aside
from tests.dist.pool import Pool
from tests.train.test_saving import build_trainer, steps

ROOT = Path(__file__).parent.parent.parent


def launch(*args: Any, max_restarts: int = 3, nproc: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", str(nproc)]
    command += ["--max-restarts", str(max_restarts), "--monitor-interval", "0.2"]
    command += [str(ROOT / "tests/train/kept_in_memory.py"), *map(str, args)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


def read(done: subprocess.CompletedProcess[str]) -> tuple[list[int], str]:
    """The steps that starts went on from, and the hash at the end."""
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(r"hash (\w+)", done.stdout)
    return [int(step) for step in re.findall(r"from (\d+)", done.stdout)], found


def list_keepers(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if MARKER in words[:4] and words[-1] == str(folder):
            found.append(process)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["dp_shard=2", pytest.param("dp_replicate=2", marks=pytest.mark.slow)])
def test_a_restart_goes_on_from_memory_with_the_same_hash(tmp_path: Path, layout: str) -> None:
    starts, expected = read(launch(tmp_path / "whole", layout, 2, 5, 8, 0))
    assert starts == [0]
    done = launch(tmp_path / "killed", layout, 2, 5, 8, 1)
    assert read(done) == ([0, 5], expected), "the newest checkpoint on the disk is of step 2"
    assert "All ranks ended after step 5 was copied" in done.stdout + done.stderr
    assert [verify(path) for path in list_at(tmp_path / "killed")] == [[], []]
    assert list_keepers(tmp_path / "killed") == [], "nothing is left after the job"


@pytest.mark.timeout(300)
def test_an_altered_state_is_named_and_not_used(tmp_path: Path) -> None:
    done = launch(tmp_path, "dp_shard=2", 2, 5, 8, 1, "flip")
    starts, _ = read(done)
    assert starts == [0, 4], "the state before is whole"
    text = done.stdout + done.stderr
    assert "part-00000.safetensors of step 5 was altered in the memory of the keeper of rank 0" in text
    assert "PL560" in text


def test_a_state_that_two_starts_ended_after_is_not_used_a_third_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=9)
    alone: Any = SimpleNamespace(world_size=1, is_main=True)
    disks = Disks((SharedDisk((0,), "node0"),), 0)

    def save(step: int, *, is_from_memory: bool) -> None:
        content = full.prepare({"weight": torch.ones(3)}, {}, {"step": step}, None)
        checkpoints.save(step, content, identity={"from_memory": is_from_memory})

    save(1, is_from_memory=False)
    for _ in range(4):
        put_failed_aside(alone, disks, checkpoints)
    assert list(checkpoints.steps()) == [1], "a checkpoint that was saved to the disk stays"
    for step in (3, 4):
        save(step, is_from_memory=True)
        put_failed_aside(alone, disks, checkpoints)
        put_failed_aside(alone, disks, checkpoints)
        assert list(checkpoints.steps())[-1] == step, "each newer state has two starts of its own"
    put_failed_aside(alone, disks, checkpoints)
    assert list(checkpoints.steps()) == [1, 3]
    assert verify(checkpoints.path / "failed-step-00000004") == [], "kept for a look"
    assert "2 starts went on from step 4" in caplog.text
    assert "PL563" in caplog.text


def refused(world: Any, folder: str, kind: str) -> str:
    trainer = build_trainer("dp_shard=2", asynchronous_saves=False)
    trainer.resume(folder)
    next(steps(trainer, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "x")
        if kind == "launcher":
            patch.delenv("TORCHELASTIC_RUN_ID")
        elif kind == "memfd":
            patch.delattr(os, "memfd_create")
        elif kind == "proc":
            patch.setattr(memory_saves, "_has_proc", lambda: False)
        elif kind == "memory":
            patch.setattr(memory_saves, "read_free_memory", lambda: 1000)
        try:
            trainer.save_to_memory()
            next(steps(trainer, 1))
        except PacelineError as error:
            return f"{error.code} {error.saw}"
        finally:
            trainer.close()
    return ""


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("launcher", "PL561 States cannot be kept in memory: no launcher started these ranks"),
        ("memfd", "PL561 States cannot be kept in memory: this system has no memfd_create"),
        ("proc", "PL561 States cannot be kept in memory: this system has no /proc"),
        ("memory", r"PL562 .* and 1000 B are free: [\d.]+ KiB are missing"),
        ("nothing", ""),
    ],
)
def test_what_memory_needs_is_named(ranks: Pool, tmp_path: Path, kind: str, shown: str) -> None:
    for found in ranks.run(refused, args=(str(tmp_path), kind)):
        assert re.match(shown, found) if shown else not found, found
    assert list_keepers(tmp_path) == []


@pytest.mark.parametrize(
    ("free", "short"), [((900, 800), None), ((900, 799), "node1"), ((599, 800), "node0")]
)
def test_each_node_needs_memory_for_its_own_states_and_for_copies(
    free: tuple[int, int], short: str | None
) -> None:
    """Node 0 has ranks 0 and 1 with 200 bytes each; node 1 has rank 2 with 400."""

    def entry(node: int, wanted: int, sent: int) -> memory_saves._MemoryEntry:
        keeper = CopyTarget(f"node{node}", "10.0.0.1", 1, "")
        return memory_saves._MemoryEntry(
            None, "", "", {}, node, "", keeper, False, wanted, sent, free[node], None
        )

    entries = [entry(0, 200, 200), entry(0, 200, 200), entry(1, 400, 200)]
    if short is None:
        memory_saves._check_free(entries, [2, 2, 0])
        return
    with pytest.raises(
        PacelineError, match=rf"on {short}, and {min(free)} B are free: 1 B are missing.*PL562"
    ):
        memory_saves._check_free(entries, [2, 2, 0])


def keep_by_cost(world: Any, folder: str) -> tuple[list[int], list[int | None]]:
    trainer = build_trainer("dp_replicate=2", asynchronous_saves=False)
    trainer.resume(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "x")
        kept, told = [], []
        for number in steps(trainer, 80):
            if trainer.save_to_memory(max_cost=0.5):
                kept.append(number)
                told.append(trainer._saver.saving.memory.interval.steps)
        trainer.close()
    return kept, told


def test_states_are_kept_as_often_as_their_cost_allows(ranks: Pool, tmp_path: Path) -> None:
    found = ranks.run(keep_by_cost, args=(str(tmp_path),))
    assert found[0] == found[1], "ranks choose alike, although each measures by itself"
    kept, told = found[0]
    assert kept[:2] == [5, 9], "the first two, before the cost is known"
    for number, (a, b) in enumerate(itertools.pairwise(kept), 1):
        # After each eighth state, steps without one are timed anew.
        assert b - a == (told[number - 1] or 4) + (4 if number % 8 == 0 else 0)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    by_step = {row["step"]: row["memory_every"] for row in rows}
    assert by_step[1] is None
    assert [by_step.get(number + 1) for number in kept[2:-1]] == told[2:-1]


def test_a_keeper_leaves_when_the_process_that_starts_ranks_has_ended(tmp_path: Path) -> None:
    home = subprocess.Popen(["sleep", "60"])
    slots = [os.memfd_create("test") for _ in range(2)]
    keeper = KeeperProcess(slots, home.pid, str(tmp_path))
    try:
        keeper._link.close()  # as when the rank is killed
        time.sleep(2.0)
        assert keeper._process.poll() is None, "it holds the memory for the next start"
        home.kill()
        home.wait()
        assert keeper._process.wait(10) == 0
    finally:
        keeper._process.kill()
        home.kill()
        for fd in slots:
            os.close(fd)


def test_a_keeper_needs_no_torch() -> None:
    code = "import paceline.checkpoint.memory_keeper, sys; print({'torch', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
