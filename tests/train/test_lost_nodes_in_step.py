"""A node of three that share a disk is lost: the others keep the last complete step, and go on from it."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.checkpoint import find_checkpoint, hash_stored, open_usable
from tests.launching.nodes import Nodes, why_no_nodes
from tests.train.test_nodes_apart import STEPS, Cluster, elastic, recipe, undisturbed

__all__ = ["recipe", "undisturbed"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.mark.skipif(why_no_nodes() is not None, reason="no nodes can be made here")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_costs_the_step_under_way(
    tmp_path: Path, recipe: Path, undisturbed: str, lost: int
) -> None:
    stay = [number for number in range(3) if number != lost]
    with Nodes(3) as nodes, ExitStack() as held:
        cluster = Cluster(tmp_path, nodes, recipe, "full")
        words = elastic(host=2)
        jobs = [
            held.enter_context(cluster.start(number, 0, words, every=1000, memory_every=100_000))
            for number in range(3)
        ]
        cluster.wait_for_row(40, 0, jobs)
        jobs[lost].process.kill()
        codes = [jobs[number].wait(200) for number in stay]
        text = "\n".join(jobs[number].text for number in stay)
    assert codes == [0, 0], text
    assert (found := re.search(r"A rank ended after step (\d+)", text)), text
    assert int(found[1]) >= 39
    folder = cluster.run_folder(0)
    assert hash_stored(open_usable(find_checkpoint(folder)).model) == undisturbed
    rows = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, STEPS + 1))
