"""Nodes join and leave a run: no step is lost, and the weights keep the bits of one process."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import find_checkpoint, hash_stored, open_usable
from paceline.checkpoint.manifest import read_manifest
from paceline.recipe import parse_recipe
from paceline.train.run import train_recipe
from paceline.world import World
from tests.dist.pool import Pool
from tests.launching.launched import Launched, paceline_run, script
from tests.launching.nodes import Nodes, why_no_nodes
from tests.launching.test_meeting import c10d, free_port
from tests.train.cases import text_recipe

pytestmark = pytest.mark.timeout(600)

STEPS = 60
MANY_STEPS = 400
NUM_SAMPLES = 93
_LIMIT_S = 120.0
_FAST = "last_call_timeout=1,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"


def list_lines(recipe: dict[str, Any]) -> str:
    sections = (
        [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
        for section, table in recipe.items()
    )
    return "\n".join(line for section in sections for line in section) + "\n"


def train_alone(world: World, recipe: dict[str, Any], folder: Path) -> None:
    train_recipe(parse_recipe(recipe), folder, world, None)


class Run:
    """A run that nodes join and leave, and one in a single process to compare it with."""

    def __init__(self, folder: Path, steps: int = STEPS, every: int = 0) -> None:
        self.folder, self.num_steps = folder, steps
        recipe = text_recipe(folder / "text")
        recipe["train"] |= {"steps": steps, "timeout_s": 60}
        recipe["checkpoint"] = {"every": 0}
        self.alone = dict(recipe)
        if every:
            recipe["checkpoint"] = {"every": every, "asynchronous": False, "mode": "sharded"}
        recipe["layout"] = {"dp_shard": "auto"}
        (folder / "recipe.toml").write_text(list_lines(recipe))

    def start(
        self,
        stack: ExitStack,
        name: str,
        endpoint: str,
        num_ranks: int = 1,
        around: Callable[..., list[str]] = list,
        nodes: str = "1:2",
        conf: str = _FAST,
        backend: str = "c10d",
    ) -> Launched:
        meeting = ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "j"]
        meeting += ["--nnodes", nodes, "--rdzv-conf", conf]
        train = [
            str(self.folder),
            "train",
            str(self.folder / "recipe.toml"),
            "--out",
            str(self.folder / "run"),
        ]
        command = paceline_run("--nproc-per-node", str(num_ranks), *meeting, script("paced.py"), *train)
        return stack.enter_context(Launched(self.folder / name, command, around=around))

    def read_steps(self) -> list[list[str]]:
        """Return the lines of all ranks so far."""
        file = self.folder / "steps"
        return [line.split(" ") for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for(self, world_size: int, *jobs: Launched) -> None:
        """Wait until a rank of a world of this size has taken a step, after those that were taken so far."""
        known, deadline = len(self.read_steps()), time.monotonic() + _LIMIT_S
        while all(line[0] != str(world_size) for line in self.read_steps()[known:]):
            assert time.monotonic() < deadline, "\n".join(job.text for job in jobs)
            time.sleep(0.1)

    def end(self, *jobs: Launched) -> None:
        (self.folder / "go").touch()
        assert [job.wait(_LIMIT_S) for job in jobs] == [0] * len(jobs), "\n".join(job.text for job in jobs)

    def check(self, ranks: Pool, sizes: list[int]) -> None:
        """No step was taken twice, no sample was left out, and every bit is that of one process."""
        lines = self.read_steps()
        sizes_by_step = dict.fromkeys(range(1, self.num_steps + 1), 0)
        used: Counter[tuple[str, str]] = Counter()
        for size, step, epoch, places in lines:
            sizes_by_step[int(step)] += 1
            assert sizes_by_step[int(step)] <= int(size), f"step {step} was taken twice: {lines}"
            used.update((epoch, place) for place in places.split(",") if place)
        assert set(used.values()) == {1}
        assert sum(epoch == "0" for epoch, _ in used) == NUM_SAMPLES
        seen = [int(size) for size, *_ in lines]
        assert [size for size, before in zip(seen, [0, *seen], strict=False) if size != before] == sizes
        rows = [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, self.num_steps + 1))
        ranks.run(train_alone, nproc=1, args=(self.alone, self.folder / "alone"), timeout_s=150)
        ours, alone = (hash_of(self.folder / name) for name in ("run", "alone"))
        assert ours == alone


def hash_of(folder: Path) -> str:
    return hash_stored(open_usable(find_checkpoint(folder)).model)


def test_ranks_that_stop_with_others_start_again(tmp_path: Path) -> None:
    """A node joins and leaves: the other one's ranks stop twice, and there are no restarts to spend."""
    meeting = [*c10d(f"127.0.0.1:{free_port()}"), "--nnodes", "1:2", "--rdzv-conf", _FAST]
    command = paceline_run(*meeting, script("stops_with_all.py"), str(tmp_path))
    with Launched(tmp_path / "first", command) as first:
        first.wait_for("runs as 0 of 1", _LIMIT_S)
        with Launched(tmp_path / "second", command) as second:
            for job in (first, second):
                job.wait_for("runs as . of 2", _LIMIT_S)
            second.signal(15)
            assert second.wait(_LIMIT_S) == 75, second.text
        first.wait_for("runs as 0 of 1", _LIMIT_S, count=2)
        (tmp_path / "end").touch()
        assert first.wait(_LIMIT_S) == 0, first.text


def test_ranks_that_need_files_of_other_nodes_wait_for_a_node(tmp_path: Path) -> None:
    """There are no restarts to spend."""
    meeting = ["--rdzv-backend", "folder", "--rdzv-endpoint", str(tmp_path / "meeting"), "--nnodes", "1:2"]
    meeting += ["--rdzv-id", "j", "--local-addr", "127.0.0.1", "--rdzv-conf", _FAST]
    command = paceline_run(*meeting, script("needs_files.py"))
    with Launched(tmp_path / "first", command) as first:
        first.wait_for("the files are on nodes that are not here", _LIMIT_S)
        with Launched(tmp_path / "second", command) as second:
            assert [first.wait(_LIMIT_S), second.wait(_LIMIT_S)] == [0, 0], first.text + second.text
        assert "joins; all ranks start again" in first.text


@pytest.mark.slow
def test_ranks_that_stop_by_themselves_end_the_job(tmp_path: Path) -> None:
    """No node joins or leaves, so all launchers pass the code on."""
    meeting = [*c10d(f"127.0.0.1:{free_port()}"), "--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=20"]
    command = paceline_run(*meeting, script("stops_with_all.py"), str(tmp_path))
    with Launched(tmp_path / "first", command) as first, Launched(tmp_path / "second", command) as second:
        for job in (first, second):
            job.wait_for("runs as . of 2", _LIMIT_S)
        (tmp_path / "stop").touch()
        assert [first.wait(_LIMIT_S), second.wait(_LIMIT_S)] == [75, 75], first.text + second.text


@pytest.mark.slow
def test_a_node_joins_and_leaves(ranks: Pool, tmp_path: Path) -> None:
    """One rank; then a node with two; then one rank again."""
    run, endpoint = Run(tmp_path), f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        first = run.start(stack, "first", endpoint)
        run.wait_for(1, first)
        second = run.start(stack, "second", endpoint, num_ranks=2)
        run.wait_for(3, first, second)
        second.signal(15)
        assert second.wait(_LIMIT_S) == 75, second.text
        run.wait_for(1, first)
        run.end(first)
        assert "the nodes have changed" in first.text
    identity = read_manifest(find_checkpoint(tmp_path / "run")).identity
    assert identity["layout"] == "dp_replicate=1"
    run.check(ranks, [1, 3, 1])


@pytest.mark.slow
def test_nodes_join_and_leave_over_a_network(ranks: Pool, tmp_path: Path) -> None:
    """Nodes with addresses of their own: one, two, three, and two again, by a layout that stretches."""
    if reason := why_no_nodes():
        pytest.skip(reason)
    run = Run(tmp_path, steps=MANY_STEPS)
    with Nodes(3) as nodes, ExitStack() as stack:
        jobs: list[Launched] = []
        for number in range(3):

            def around(command: Any, number: int = number) -> list[str]:
                return nodes.command(number, command)

            jobs.append(run.start(stack, f"node{number}", "node0:29501", around=around, nodes="1:3"))
            run.wait_for(number + 1, *jobs)
        jobs[1].signal(15)
        assert jobs[1].wait(_LIMIT_S) == 75, jobs[1].text
        run.wait_for(2, *jobs)
        jobs[2].signal(10)
        assert jobs[2].wait(_LIMIT_S) == 75, jobs[2].text
        run.wait_for(1, *jobs)
        run.end(jobs[0])
    run.check(ranks, [1, 2, 3, 2, 1])
