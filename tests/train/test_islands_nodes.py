"""A cut link between two nodes: islands go on with the same bits, or end in one verdict and resume."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.launching.launched import Launched, paceline_run
from tests.launching.nodes import Nodes, why_no_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = Path(__file__).parent / "island_steps.py"
_END_S = 90.0


def train_alone(folder: Path) -> tuple[str, int]:
    """Return the hash of the weights, and the first step that this start has taken."""
    words = [sys.executable, "-W", "ignore", str(STEPS), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return find_hash(done.stdout), int(re.findall(r"step (\d+)", done.stdout)[0])


def find_hash(text: str) -> str:
    found: str = re.findall(r"hash (\w+)", text)[-1]
    return found


def start_on_both(stack: ExitStack, nodes: Nodes, folder: Path, hang_after_s: int) -> list[Launched]:
    jobs = []
    for node in range(2):
        flags = ["--nnodes", "2", "--nproc-per-node", "1", "--hang-after", str(hang_after_s)]
        meeting = ["--node-rank", str(node), "--master-addr", nodes.address(0)]
        command = paceline_run(*flags, *meeting, str(STEPS), str(folder / "run"))
        jobs.append(
            stack.enter_context(Launched(folder / str(node), command, around=partial(nodes.command, node)))
        )
    return jobs


def test_a_link_that_is_cut(tmp_path: Path) -> None:
    if reason := why_no_nodes():
        pytest.skip(reason)
    expected, _ = train_alone(tmp_path / "alone")
    nodes = Nodes(2)
    with nodes, ExitStack() as stack:
        jobs = start_on_both(stack, nodes, tmp_path, 60)
        jobs[0].wait_for(r"step 17\b", _END_S)
        nodes.cut(1)
        time.sleep(8)
        nodes.heal(1)
        assert [job.wait(_END_S) for job in jobs] == [0, 0], jobs[0].text
        assert find_hash(jobs[0].text) == expected
    nodes = Nodes(2)
    folder = tmp_path / "long"
    with nodes, ExitStack() as stack:
        jobs = start_on_both(stack, nodes, folder, 5)
        jobs[0].wait_for(r"step 37\b", _END_S)
        nodes.cut(1)
        for job in jobs:
            assert job.wait(_END_S) == 1
            assert len(re.findall(r"\[PL812\]", job.text)) == 1, job.text
    found, first = train_alone(folder / "run")
    assert found == expected
    assert first == 36  # the exchange after step 35 was saved
