"""`paceline run` on jobs that hang and jobs that don't: real ranks and launchers, on one node and on two."""

from __future__ import annotations

import re
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.launching.launched import Launched, paceline_run
from tests.launching.nodes import Nodes, why_no_nodes

pytestmark = pytest.mark.timeout(240)
STEPS = str(Path(__file__).parent / "scripts" / "own" / "steps.py")
WAITS = 1 + next(n for n, line in enumerate(Path(STEPS).read_text().splitlines()) if "# WAITS" in line)
_END_S = 120.0


def run(folder: Path, *words: str, nproc: int = 3, hang_after_s: float = 4) -> Launched:
    flags = ["--nproc-per-node", str(nproc), "--hang-after", str(hang_after_s)]
    return Launched(folder, paceline_run(*flags, STEPS, *words))


def test_a_rank_that_sleeps_is_named_with_both_lines(tmp_path: Path) -> None:
    with run(tmp_path, "sleep", "4", "1") as job:
        assert job.wait(_END_S) == 1
        verdict = job.text[job.text.index("paceline: rank 1 never reached") :]
        first = verdict.splitlines()[0]
        assert first.endswith("[PL800]")
        assert "all_reduce number 4 of world" in first
        assert "ranks 0 and 2 have waited" in first
        assert f"steps.py:{WAITS} in main" in first
        assert "asleep in time.sleep" in first
        assert "steps.py:20 in disturb" in first
        assert "rank 0 step 3" in job.text
        assert not job.find_left(5)


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    with run(tmp_path, "stop", "3", "2") as job:
        assert job.wait(_END_S) == 1
        assert "[PL809]" in job.text
        assert "rank 2" in job.text.splitlines()[job.text.count("\n", 0, job.text.index("[PL809]"))]
        assert not job.find_left(5)


def test_a_job_without_a_hang_ends_as_it_would(tmp_path: Path) -> None:
    with run(tmp_path, "nothing", "12", "0", hang_after_s=2) as job:
        assert job.wait(_END_S) == 0
        assert "[PL8" not in job.text


def test_a_rank_that_computes_is_waited_for(tmp_path: Path) -> None:
    with run(tmp_path, "compute", "3", "1", "8", hang_after_s=2) as job:
        assert job.wait(_END_S) == 0
        assert "[PL8" not in job.text


def test_keep_alive_reports_and_ends_nothing(tmp_path: Path) -> None:
    command = paceline_run(
        "--nproc-per-node", "2", "--hang-after", "3", "--keep-alive", STEPS, "sleep", "3", "1"
    )
    with Launched(tmp_path, command) as job:
        job.wait_for(r"\[PL800\]", _END_S)
        time.sleep(1.0)
        assert job.process.poll() is None
        job.signal(signal.SIGINT)
        assert job.wait(_END_S) == 1
        assert job.text.count("[PL800]") == 1


def test_no_watch_does_not_watch(tmp_path: Path) -> None:
    command = paceline_run(
        "--nproc-per-node", "2", "--hang-after", "1", "--no-watch", STEPS, "sleep", "3", "1"
    )
    with Launched(tmp_path, command) as job:
        job.wait_for("rank 0 step 2", _END_S)
        time.sleep(6.0)
        assert job.process.poll() is None
        assert "[PL8" not in job.text
        job.signal(signal.SIGINT)
        assert job.wait(_END_S) == 1


def test_where_a_rank_dies_the_others_places_are_reported(tmp_path: Path) -> None:
    with run(tmp_path, "die", "3", "0") as job:
        assert job.wait(_END_S) == 1
        assert "rank 0 was killed by SIGKILL" in job.text
        after = job.text[job.text.index("rank 0 was killed") :]
        assert "Meanwhile:" in after
        assert re.search("ranks 1 and 2 .*asleep", after)


@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_a_time_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    with Launched(tmp_path, paceline_run("--hang-after", value, STEPS)) as job:
        assert job.wait(_END_S) == 2
        assert "[PL349]" in job.text


# ---- two nodes


@pytest.fixture
def nodes() -> Nodes:
    if reason := why_no_nodes():
        pytest.skip(reason)
    return Nodes(2)


def start_on_both(stack: ExitStack, nodes: Nodes, folder: Path, *words: str) -> list[Launched]:
    jobs = []
    for node in range(2):
        flags = ["--nnodes", "2", "--nproc-per-node", "1", "--hang-after", "5"]
        meeting = ["--node-rank", str(node), "--master-addr", nodes.address(0)]
        command = paceline_run(*flags, *meeting, STEPS, *words)
        job = Launched(folder / str(node), command, around=partial(nodes.command, node))
        jobs.append(stack.enter_context(job))
    return jobs


def test_every_node_reports_the_verdict(tmp_path: Path, nodes: Nodes) -> None:
    with nodes, ExitStack() as stack:
        for job in start_on_both(stack, nodes, tmp_path, "sleep", "3", "0"):
            assert job.wait(_END_S) == 1
            assert "rank 0 never reached all_reduce number 3 of world" in job.text
            assert f"steps.py:{WAITS} in main" in job.text
            assert "asleep in time.sleep" in job.text


def test_a_node_that_can_not_be_reached_is_named(tmp_path: Path, nodes: Nodes) -> None:
    with nodes, ExitStack() as stack:
        jobs = start_on_both(stack, nodes, tmp_path, "nothing", "1000", "0")
        for job in jobs:
            job.wait_for(r"rank \d step 30\b", _END_S)
        nodes.cut(1)
        for here, job in enumerate(jobs):
            assert job.wait(_END_S) == 1
            assert "[PL812]" in job.text, job.text
            assert f"node{1 - here}" in job.text, job.text
