"""A job that cannot go on without a node names it, and ends; jobs that go on: test_run_nodes.py."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launching.launched import Launched, paceline_run, script
from tests.launching.test_meeting import c10d, free_port

pytestmark = pytest.mark.timeout(150)


def lose_the_second(folder: Path, *flags: str) -> Launched:
    """Two launchers, of which the second one is killed; gives the first one when it has ended."""
    port = free_port()
    command = paceline_run("--nnodes", "2", *c10d(f"127.0.0.1:{port}"), *flags, script("endless.py"), "plain")
    with ExitStack() as stack:
        jobs = [stack.enter_context(Launched(folder / str(node), command)) for node in range(2)]
        for job in jobs:
            job.wait_for(r"ready \d", 60)
        jobs[1].process.kill()
        assert jobs[0].wait(60) == 1, jobs[0].text
        assert not (left := jobs[0].find_left(5)), f"left: {left}"
        return jobs[0]


def test_a_job_that_needs_all_of_its_nodes_ends_with_the_name_of_the_lost_one(tmp_path: Path) -> None:
    text = lose_the_second(tmp_path).text
    assert "is lost: its connection was closed. The ranks of this node were ended." in text
    assert text.rstrip().endswith("[PL372]")


@pytest.mark.slow
def test_a_job_that_waits_for_a_lost_node_in_vain_names_it(tmp_path: Path) -> None:
    text = lose_the_second(tmp_path, "--max-restarts", "3", "--join-timeout", "5").text
    assert "the nodes have changed" in text
    assert "1 of at least 2 nodes were there after 5 s (--join-timeout). Missing: " in text
    assert text.rstrip().endswith("[PL375]")
