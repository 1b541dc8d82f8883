"""States in memory: a restarted run goes on from the newest one, unless it was altered or cannot be used."""

from __future__ import annotations

import itertools
import json
import logging
import logging.handlers
import os
import re
import signal
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
from paceline.checkpoint.memory.held_states import _list_keepers
from paceline.checkpoint.memory.keeper import MARKER, KeeperProcess
from paceline.checkpoint.memory.sending import CopyTarget
from paceline.errors import PacelineError
from paceline.train import memory_states
from paceline.train.memory_states import MemoryStates
from paceline.train.state import memory_saves
from paceline.train.state.disks import Disks, SharedDisk
from paceline.train.state.memory_restore import put_failed_aside
from paceline.train.state.transfer import gather
from tests.dist.pool import Pool
from tests.train.kept_in_memory import flip
from tests.train.test_saving import Samples, build_trainer, describe, steps

ROOT = Path(__file__).parent.parent.parent


def launch(*args: Any, max_restarts: int = 3, nproc: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", str(nproc)]
    command += ["--max-restarts", str(max_restarts), "--monitor-interval", "0.2"]
    command += [str(ROOT / "tests/train/kept_in_memory.py"), *map(str, args)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


def read(done: subprocess.CompletedProcess[str]) -> tuple[list[int], str]:
    """Return the steps that starts went on from, and the hash at the end."""
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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_ends_by_an_error_leaves_its_state(tmp_path: Path) -> None:
    done = launch(tmp_path, "dp_shard=2", 2, 5, 8, 1, "one")
    starts, _ = read(done)
    text = done.stdout + done.stderr
    assert "rank 0 ends by" in text, "the other one was killed"
    assert starts == [0, 5], text


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
        with pytest.raises(PacelineError, match=r"of which they may take 99%: 8 B are missing.*PL562"):
            memory_saves._check_free(entries, [2, 2, 0], 0.99)
        return
    with pytest.raises(
        PacelineError, match=rf"on {short}, and {min(free)} B are free: 1 B are missing.*PL562"
    ):
        memory_saves._check_free(entries, [2, 2, 0])


def lose_each_node(world: Any, folder: str, end: str) -> list[str]:
    """Two ranks as two nodes: after each state, what is wrong with what is left if one of them is lost.

    In the end node 1 is lost, or a byte of its share is altered.
    """
    world.node_rank, world.num_nodes = world.rank, 2
    trainer = build_trainer("dp_shard=2", asynchronous_saves=False)
    trainer.resume(folder)
    memory = trainer._saver.saving.memory
    wrong: list[str] = []

    def look(when: str, least: int) -> None:
        gathered = gather(world, memory._keeper and memory._keeper.pid)
        keepers = dict(_list_keepers(Path(folder).absolute(), os.getppid()))
        for survivor in gathered:
            writers: dict[int, set[int]] = {}
            for held in keepers[survivor][1] if survivor in keepers else ():
                writers.setdefault(held.share.step, set()).add(held.share.writer)
            newest = max((step for step, each in writers.items() if each == {0, 1}), default=0)
            if newest < least:
                wrong.append(f"{when}: of {writers}, {newest} is the newest whole step")
        world.barrier()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "x")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        for number in steps(trainer, 12):
            trainer.save_to_memory()
            look(f"while step {number} is copied", number - 1)
            if number == 6 and world.rank == 1:
                assert memory._keeper is not None
                memory._keeper._process.kill()
            if number == 6:
                break
        # The copies of step 6 may be lost, here or there. The next state starts a keeper again.
        for number in steps(trainer, 5):
            trainer.save_to_memory()
            look(f"later, while step {number} is copied", 0 if number < 9 else number - 1)
    memory._finish()
    expected, keeper = describe(trainer), memory._keeper
    assert keeper is not None
    world.has_failed = True  # so that keepers hold what they have
    trainer.close()
    world.has_failed = False
    if world.rank == 1 and end == "lost":
        os.kill(keeper.pid, signal.SIGKILL)
    elif world.rank == 1:
        held = dict(_list_keepers(Path(folder).absolute(), os.getppid()))[keeper.pid][1]
        flip([each for each in held if each.share.step == 11 and not each.is_copy])
    world.barrier()
    told = logging.handlers.BufferingHandler(100)
    logging.getLogger("paceline").addHandler(told)
    again = build_trainer("dp_shard=2", asynchronous_saves=False)
    again.loader(Samples(), global_batch_size=8, name="train")
    if (first := again.resume(folder)) != 11 or describe(again) != expected:
        wrong.append(f"resumed at {first}")
    again.close()
    logging.getLogger("paceline").removeHandler(told)
    text = "\n".join(record.getMessage() for record in told.buffer)
    altered = "part-00001.safetensors of step 11 was altered in the memory of the keeper of rank 1"
    if world.is_main and (end == "lost", altered in text, "copies of what rank 1 held" in text) not in (
        (True, False, True),
        (False, True, True),
    ):
        wrong.append(text)
    world.node_rank, world.num_nodes = 0, 1
    return wrong


@pytest.mark.parametrize("end", ["lost", "altered"])
def test_the_loss_of_either_node_leaves_a_whole_state(ranks: Pool, tmp_path: Path, end: str) -> None:
    for found in ranks.run(lose_each_node, args=(str(tmp_path), end), timeout_s=60):
        assert found == []
    assert list_keepers(tmp_path) == []


def count_on_disks(world: Any, folder: str) -> list[str]:
    """Two disks, of which one has not noted the starts before."""
    own = Path(folder) / f"disk-{world.rank}"
    checkpoints = CheckpointFolder(own, keep=9)
    disks = Disks((SharedDisk((0,), "a"), SharedDisk((1,), "b")), world.rank)
    content = full.prepare({"weight": torch.ones(3)}, {}, {}, None)
    for step in (1, 2):
        checkpoints.save(step, content, identity={"from_memory": step == 2})
    found = []
    for number in range(3):
        if number == 1 and world.rank == 1:
            (checkpoints.path / ".memory-loads.json").unlink()
        put_failed_aside(world, disks, checkpoints)
        found.append(list_at(own)[-1].name)
    return found


def test_all_disks_put_a_state_aside_together(ranks: Pool, tmp_path: Path) -> None:
    newest = ["step-00000002", "step-00000002", "step-00000001"]
    assert ranks.run(count_on_disks, args=(str(tmp_path),)) == [newest, newest]


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


def keep_by_default(world: Any, folder: str, free: int) -> tuple[list[int], list[str]]:
    """Nine steps as a recipe's run takes them, with so much free memory; the first minute is over at once."""
    trainer = build_trainer("dp_shard=2", asynchronous_saves=False)
    trainer.resume(folder)
    told = logging.handlers.BufferingHandler(100)
    logging.getLogger("paceline").addHandler(told)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "x")
        patch.setenv("TORCHELASTIC_MAX_RESTARTS", "1" if world.rank else "2")
        patch.setattr(memory_states, "_FIRST_S", 0.0)
        patch.setattr(memory_saves, "read_free_memory", lambda: free)
        kept: list[int] = []

        def keep(max_cost: float | None = None, max_memory: float = 1.0) -> bool:
            found = trainer.save_to_memory(max_cost, max_memory)
            kept.extend([trainer.step_number] * found)
            return found

        states = MemoryStates(world, "auto", keep)
        for number in steps(trainer, 9):
            states.after(number)
        has_keeper = trainer._saver.saving.memory._keeper is not None
        trainer.close()
    logging.getLogger("paceline").removeHandler(told)
    assert has_keeper == bool(kept)
    return kept, [record.getMessage() for record in told.buffer]


@pytest.mark.parametrize("is_short", [False, True])
def test_too_little_memory_is_a_remark_unless_a_number_asks_for_states(
    ranks: Pool, tmp_path: Path, is_short: bool
) -> None:
    first, second = ranks.run(keep_by_default, args=(str(tmp_path), 30_000 if is_short else 1 << 30))
    if not is_short:
        assert first == second == ([8], []), "four steps are timed before the first state"
        return
    assert second == ([], []), "rank 0 tells it"
    kept, (told,) = first
    assert kept == []
    assert re.match(r"No states are kept in memory: .* may take 25%: .* are missing\. .* \[PL562\]$", told)


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
    code = "import paceline.checkpoint.memory.keeper, sys; print({'torch', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
