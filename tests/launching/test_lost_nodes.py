"""A job that cannot go on without a node names it, and ends; jobs that go on: test_run_nodes.py."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.launching.members.pulse import read_record
from paceline.launching.members.shared_folder import SharedFolder
from tests.dist.pool import Pool
from tests.launching.launched import Launched, paceline_run, script
from tests.launching.nodes import Nodes, why_no_nodes
from tests.launching.test_meeting import c10d
from tests.launching.test_membership_changes import Run, hash_of, train_alone

pytestmark = pytest.mark.timeout(150)


def lose_the_second(folder: Path, *flags: str) -> Launched:
    """Two launchers, of which the second one is killed; gives the first one when it has ended."""
    meeting = ["--rdzv-backend", "folder", "--rdzv-endpoint", str(folder / "meeting"), "--rdzv-id", "j"]
    meeting += ["--local-addr", "127.0.0.1", "--nnodes", "2"]
    command = paceline_run(*meeting, *flags, script("endless.py"), "plain")
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
    assert "is lost: no beat for 3 s. The ranks of this node were ended." in text
    assert text.rstrip().endswith("[PL372]")


@pytest.mark.slow
def test_a_job_that_waits_for_a_lost_node_in_vain_names_it(tmp_path: Path) -> None:
    text = lose_the_second(tmp_path, "--max-restarts", "3", "--join-timeout", "5").text
    assert "the nodes have changed" in text
    assert "1 of at least 2 nodes were there after 5 s (--join-timeout). Missing: " in text
    assert "[PL375]" in text


@pytest.mark.slow
def test_a_port_that_another_program_has_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        command = paceline_run("--nnodes", "2", *c10d(endpoint), "--detect-s", "1", script("sums.py"))
        with Launched(tmp_path, command) as job:
            assert job.wait(60) == 2, job.text
            assert "what listens there does not answer as the store of a job" in job.text
            assert "[PL381]" in job.text


@pytest.mark.slow
def test_a_launcher_that_stands_still_while_a_round_forms_keeps_no_other_waiting(tmp_path: Path) -> None:
    """Number 0 stops once it has joined, 3 s before the round is complete and 6 s before it is lost."""
    meeting = ["--rdzv-backend", "folder", "--rdzv-endpoint", str(tmp_path / "meeting"), "--rdzv-id", "j"]
    meeting += ["--local-addr", "127.0.0.1", "--nnodes", "1:4", "--max-restarts", "3"]
    meeting += ["--detect-s", "6", "--rdzv-conf", "last_call_timeout=12"]
    command = paceline_run(*meeting, script("steps.py"), str(tmp_path))
    store, jobs, joined_s = SharedFolder(tmp_path / "meeting", "j"), dict[str, Launched](), 0.0
    with ExitStack() as stack:
        for node in range(3):
            job = stack.enter_context(Launched(tmp_path / str(node), command))
            end_s = time.monotonic() + 60
            while not (new := read_record(store.read()).numbers.keys() - jobs.keys()):
                assert time.monotonic() < end_s, job.text
                time.sleep(0.05)
            joined_s = time.monotonic()
            jobs[new.pop()] = job
        first = jobs.pop(min(jobs))
        time.sleep(joined_s + 9 - time.monotonic())
        for process in first.processes():
            process.suspend()
        assert not read_record(store.read()).is_complete
        for job in jobs.values():
            job.wait_for("round 1 on 3 nodes", 30)
            job.wait_for("round 2 on 2 nodes", 15)
        steps = tmp_path / "steps.jsonl"
        end_s = time.monotonic() + 30
        while not steps.exists() or json.loads(steps.read_text().splitlines()[0])["size"] != 2:
            assert time.monotonic() < end_s, [job.text for job in jobs.values()]
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_loses_its_first_node_has_the_bits_of_one_process(ranks: Pool, tmp_path: Path) -> None:
    """Three nodes with a common folder; number 0 is killed without a word, and comes back."""
    if reason := why_no_nodes():
        pytest.skip(reason)
    run = Run(tmp_path, steps=80)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("every = 0", "every = 3"))
    with Nodes(3) as nodes, ExitStack() as stack:

        def start(node: int, name: str) -> Launched:
            def around(command: Sequence[str]) -> list[str]:
                return nodes.powered(nodes.command(node, command))

            place = str(tmp_path / "meeting")
            return run.start(stack, name, place, around=around, nodes="1:3", backend="folder")

        jobs = [start(node, f"node{node}") for node in range(3)]
        run.wait_for(3, *jobs)
        jobs[0].process.kill()
        run.wait_for(2, *jobs[1:])
        jobs[0] = start(0, "node0-again")
        run.wait_for(3, *jobs)
        run.end(*jobs)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 81))
    ranks.run(train_alone, nproc=1, args=(run.alone, tmp_path / "alone"))
    assert hash_of(tmp_path / "run") == hash_of(tmp_path / "alone")
