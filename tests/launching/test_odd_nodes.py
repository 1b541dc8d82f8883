"""Nodes in odd states: clocks that jump, losses one way, long links, spares, and halves of a job."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.nodes import Job, check_one_history
from tests.chaos.random_nodes import Tally, judge, list_program, read_rows, train_alone
from tests.launching.launched import paceline_run, script
from tests.launching.nodes import why_no_nodes
from tests.launching.test_meeting import c10d, free_port, run_both
from tests.launching.wan import Wan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
LIMIT_S = 90.0


@pytest.fixture(autouse=True, scope="module")
def _nodes_can_be_made() -> None:
    if reason := why_no_nodes():
        pytest.skip(reason)


def start(stack: ExitStack, folder: Path, count: int, nnodes: str, *flags: str, store: str = "folder") -> Job:
    """Return a job of `steps.py` that trains on all of its nodes."""
    flags = ("--max-restarts", "3", *flags)
    job = stack.enter_context(Job(folder, count, nnodes, paceline_run, flags=flags, store=store))
    for node in range(count):
        job.start(node)
    most = int(nnodes.rpartition(":")[2])
    assert job.await_step(lambda row: row["size"] == most, LIMIT_S) is not None, job.text
    time.sleep(2)
    return job


def await_step_later(job: Job, size: int, seconds: float = LIMIT_S) -> None:
    begin_s = time.monotonic()
    row = job.await_step(lambda row: row["at_s"] > begin_s and row["size"] == size, seconds)
    assert row is not None, job.text
    check_one_history(job.rows())


def test_clocks_that_jump_by_two_minutes_disturb_nobody(tmp_path: Path) -> None:
    """90 steps of 0.05 s are longer than the 3 s after which a silent node is lost."""
    meeting = ["--nnodes", "2", *c10d(f"127.0.0.1:{free_port()}"), "--max-restarts", "1"]
    plain = paceline_run(*meeting, script("sums.py"), "90")
    jumping = [sys.executable, script("restless_clock.py"), "120", *meeting, script("sums.py"), "90"]
    ends = run_both(tmp_path, [plain, jumping])
    assert [code for code, _ in ends] == [0, 0], ends
    assert not any("the nodes have changed" in text for _, text in ends), ends


def test_a_node_whose_messages_are_lost_is_put_out_and_comes_back(tmp_path: Path) -> None:
    """It receives all the while; what it sends does not arrive, so its beats do not either."""
    with ExitStack() as stack:
        job = start(stack, tmp_path, 3, "1:3", store="etcd")
        first = int(job.rows()[-1]["host"].removeprefix("node"))
        node = next(n for n in (2, 1) if n != first)
        job.nodes.mute(node)
        await_step_later(job, 2)
        assert f"node{node} (10.77.0.{10 + node}) is lost: no beat for 3 s" in job.launched[first].text
        job.nodes.unmute(node)
        await_step_later(job, 3)


def test_a_link_of_200_ms_costs_no_node(tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = stack.enter_context(Job(tmp_path, 2, "1:2", paceline_run, flags=["--max-restarts", "3"]))
        stack.enter_context(Wan([job.nodes.namespace(n) for n in range(2)], 200.0, 100.0))
        for node in range(2):
            job.flags = ["--max-restarts", "3", "--local-addr", f"10.78.0.{10 + node}"]
            job.flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.78.0.10:29501"]
            job.start(node, interface="wan0")
        assert job.await_step(lambda row: row["size"] == 2, LIMIT_S) is not None, job.text
        time.sleep(15)
        await_step_later(job, 2)
        assert "the nodes have changed" not in job.text
        job.kill(1)
        await_step_later(job, 1)


def test_a_node_that_is_only_slow_is_not_put_out(tmp_path: Path) -> None:
    """Its processes run for a tenth of the time, in pieces shorter than --detect-s."""
    with ExitStack() as stack:
        job = start(stack, tmp_path, 3, "1:3")
        end_s = time.monotonic() + 25
        while time.monotonic() < end_s:
            job.each_process(2, psutil.Process.suspend)
            time.sleep(1.0)
            job.each_process(2, psutil.Process.resume)
            time.sleep(0.1)
        await_step_later(job, 3)
        assert "the nodes have changed" not in job.text


def test_a_spare_that_dies_disturbs_nobody(tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = start(stack, tmp_path, 3, "1:2")
        spare = next(n for n, launched in job.launched.items() if "round 1 on" not in launched.text)
        before = len(job.rows())
        job.kill(spare)
        time.sleep(8)
        rows = job.rows()
        assert len(rows) > before
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "no step was taken again"
        assert "the nodes have changed" not in job.text


def test_a_second_job_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """Its launchers would join the first one as spares."""
    with ExitStack() as stack:
        first = stack.enter_context(Job(tmp_path, 2, "1:2", paceline_run))
        first.start(0)
        assert first.await_step(lambda row: row["size"] == 1, LIMIT_S) is not None, first.text
        first.program = [script("sums.py"), "90"]
        first.start(1)
        assert first.launched[1].wait(60) == 2, first.text
        text = first.launched[1].text
        assert re.search(r"the job runs steps.py \(\w{8}\), and this node runs sums.py \(\w{8}\)", text)
        assert text.rstrip().endswith("[PL376]")
        await_step_later(first, 1)


def test_a_job_that_never_has_enough_nodes_says_so(tmp_path: Path) -> None:
    with ExitStack() as stack:
        flags = ["--join-timeout", "5"]
        job = stack.enter_context(Job(tmp_path, 1, "2:3", paceline_run, flags=flags))
        job.start(0)
        assert job.launched[0].wait(60) == 2, job.text
        assert "1 of at least 2 nodes were there after 5 s (--join-timeout)" in job.text
        assert "[PL375]" in job.text
        assert job.rows() == []


# ---- halves


# The node with the store is on the other side.
@pytest.mark.parametrize("minority", [(3, 4), (0, 1)], ids=["without number 0", "with number 0"])
def test_halves_with_disks_of_their_own_have_one_history(tmp_path: Path, minority: tuple[int, ...]) -> None:
    with ExitStack() as stack:
        flags = ["--max-restarts", "3"]
        job = stack.enter_context(Job(tmp_path, 5, "1:5", paceline_run, flags=flags, store="etcd"))
        for node in range(5):
            (tmp_path / f"disk-{node}").mkdir()
            job.program[1] = str(tmp_path / f"disk-{node}")
            job.start(node)

        def await_size(size: int) -> None:
            begin_s = time.monotonic()
            while not any(row["at_s"] > begin_s and row["size"] == size for row in list_steps()):
                assert time.monotonic() - begin_s < 150, job.text
                time.sleep(0.2)

        def list_steps() -> list[dict[str, Any]]:
            files = [path.read_text() for path in tmp_path.glob("disk-*/steps.jsonl")]
            return [
                json.loads(line) for text in files for line in text.splitlines(keepends=True) if "\n" in line
            ]

        await_size(5)
        job.nodes.split(minority)
        cut_s = time.monotonic()
        await_size(3)
        time.sleep(max(0.0, cut_s + 30 - time.monotonic()))
        after = [row for row in list_steps() if row["at_s"] > cut_s + 5]
        assert {row["size"] for row in after} == {3}, "only the greater half trains"
        job.nodes.join()
        await_size(5)
        check_one_history(sorted(list_steps(), key=lambda row: row["at_s"]))


class Commits(threading.Thread):
    """Reads the run's checkpoints as they come; each row is a step and the generation that committed it."""

    def __init__(self, checkpoints: Path) -> None:
        super().__init__(daemon=True)
        self._checkpoints, self._ends = checkpoints, threading.Event()
        self.seen: set[tuple[int, int]] = set()

    def __enter__(self) -> Commits:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self.join()

    def run(self) -> None:
        while not self._ends.wait(0.05):
            for path in self._checkpoints.glob("step-*/manifest.json"):
                with suppress(OSError, ValueError):  # it may have just been removed
                    manifest = json.loads(path.read_bytes())
                    self.seen.add((manifest["step"], manifest["identity"]["generation"]))


@pytest.mark.parametrize("minority", [(3, 4), (0, 1)], ids=["without number 0", "with number 0"])
def test_halves_with_a_common_disk_have_one_history(tmp_path: Path, minority: tuple[int, ...]) -> None:
    """Both halves see the run's folder for a minute; each step is committed by one start of the run."""
    alone = train_alone(tmp_path / "alone")
    folder = tmp_path / "job"
    folder.mkdir()
    flags = ["--max-restarts", "9"]
    program = list_program(folder, "dp_replicate", 0.5)
    with (
        Job(folder, 5, "1:5", paceline_run, program, flags, "etcd") as job,
        Commits(folder / "run/checkpoints") as log,
    ):
        for node in range(5):
            job.start(node)

        def await_size(size: int) -> None:
            begin_s = time.monotonic()
            while not any(row["at_s"] > begin_s and row["size"] == size for row in read_rows(folder)):
                assert time.monotonic() - begin_s < 150, job.text
                time.sleep(0.2)

        await_size(5)
        while not log.seen:
            time.sleep(0.2)
        job.nodes.split(minority)
        cut_s = time.monotonic()
        await_size(3)
        time.sleep(max(0.0, cut_s + 60 - time.monotonic()))
        assert {row["size"] for row in read_rows(folder) if row["at_s"] > cut_s + 5} == {3}
        job.nodes.join()
        await_size(5)
        (folder / "go").touch()
        assert [job.launched[node].wait(150) for node in range(5)] == [0] * 5, job.text
    tally = Tally()
    judge(folder, alone, tally, "dp_replicate")
    assert tally.wrong == []
    steps = [step for step, _ in log.seen]
    assert len(steps) == len(set(steps)), "never two commits of a step from two starts"
    assert sorted(generation for _, generation in log.seen) == [g for _, g in sorted(log.seen)]
    assert len({generation for _, generation in log.seen}) >= 3, "before, during and after the split"
