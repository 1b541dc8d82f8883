"""`--evict-slow`: a slow node is put out of an elastic job, by name and with its evidence."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launching.launched import Launched, paceline_run, script
from tests.launching.test_meeting import c10d, free_port

_LIMIT_S = 150.0


@pytest.mark.slow  # a node must be slow for 10 s at least
@pytest.mark.timeout(400)
@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_node_is_put_out_and_the_others_go_on(slow: int, tmp_path: Path) -> None:
    words = [*c10d(f"127.0.0.1:{free_port()}"), "--nnodes", "2:3", "--evict-slow", "12"]
    command = paceline_run(*words, script("slow_node.py"), str(tmp_path))
    with ExitStack() as stack:
        jobs: list[Launched] = []
        for node in range(3):
            env = {"SLOW_NODE": "1" if node == slow else None, "XDG_STATE_HOME": str(tmp_path)}
            jobs.append(stack.enter_context(Launched(tmp_path / str(node), command, env=env)))
            if node == 0:
                jobs[0].wait_for("a node is lost after", _LIMIT_S)
        assert jobs[slow].wait(_LIMIT_S) == 75
        told = jobs[slow].text[jobs[slow].text.rindex("This node was put out of the job") :]
        assert "because it is slow: for " in told
        assert " waited in collectives for " in told
        assert "slow_node.py:" in told
        assert "[PL822]" in told
        others = [job for node, job in enumerate(jobs) if node != slow]
        for job in others:
            job.wait_for(r"is put out of the job, because it is slow: for \d+ s, rank", 10)
            job.wait_for(r"rank \d of 2 goes on from step [1-9]\d*", _LIMIT_S)
            assert "left: it was asked to leave" in job.text
        (tmp_path / "end").touch()
        assert [job.wait(60) for job in others] == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_slow_node_stays_where_the_job_needs_it(tmp_path: Path) -> None:
    words = [*c10d(f"127.0.0.1:{free_port()}"), "--nnodes", "2:3", "--evict-slow", "10"]
    words += ["--rdzv-conf", "last_call_timeout=1"]
    command = paceline_run(*words, script("slow_node.py"), str(tmp_path))
    with ExitStack() as stack:
        jobs = []
        for node in range(2):
            env = {"SLOW_NODE": "1" if node == 1 else None, "XDG_STATE_HOME": str(tmp_path)}
            jobs.append(stack.enter_context(Launched(tmp_path / str(node), command, env=env)))
        slow = jobs[1]
        slow.wait_for(
            "this node is slow, and stays in the job .*: the job needs 2 nodes, and 1 would", _LIMIT_S
        )
        assert [job.process.poll() for job in jobs] == [None, None]
        (tmp_path / "end").touch()
        assert [job.wait(60) for job in jobs] == [0, 0]
        assert slow.text.count("stays in the job") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nnodes", "2", "--rdzv-backend", "c10d"], "--evict-slow 60 with --nnodes 2."),
        (["--nnodes", "2:2", "--rdzv-backend", "c10d"], "--evict-slow 60 with --nnodes 2:2."),
        (["--standalone"], "--evict-slow 60 with --nnodes"),
        (["--nnodes", "1:2"], "--evict-slow 60 with --rdzv-backend static."),
        (
            ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"],
            "--rdzv-conf store_type=file.",
        ),
        (["--nnodes", "1:2", "--rdzv-backend", "c10d", "--no-watch"], "--evict-slow 60 with --no-watch."),
        (["--nnodes", "1:2", "--rdzv-backend", "c10d", "--evict-slow", "5"], "--evict-slow 5."),
    ],
)
def test_a_job_that_cannot_put_a_node_out_is_refused(words: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    command = paceline_run("--evict-slow", "60", "--rdzv-endpoint", "127.0.0.1:1", *words, "train.py")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "[PL385]" in done.stderr
