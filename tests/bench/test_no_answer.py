"""Measuring links to a rank that never answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# Rank 1 never answers.
RANK = """
import json, time
from paceline.bench.link_times import measure_links
from paceline.errors import PacelineError
from paceline.world import start

with start(device="cpu", timeout_s=4, threads_per_rank=1) as world:
    if world.rank == 1:
        time.sleep(60)
    try:
        measure_links(world)
    except PacelineError as error:
        print(json.dumps([error.code, str(error)]), flush=True)
"""


def start_ranks() -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        environ = os.environ | {key: str(value) for key, value in place.items()}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        pipe = subprocess.PIPE
        ranks.append(
            subprocess.Popen([sys.executable, "-c", RANK], env=environ, stdout=pipe, stderr=pipe, text=True)
        )
    return ranks


def test_a_rank_that_never_answers_ends_the_measurement_of_links() -> None:
    ranks = start_ranks()
    try:
        assert ranks[0].stdout is not None
        code, text = json.loads(ranks[0].stdout.readline())
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert code == "PL954"
    assert "rank 0 got no answer" in text
    assert "4 s" in text
