"""Two real processes that are not what they seem: in two PID namespaces of one host, or without an answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.launching.nodes import why_no_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def start_ranks(task: str, around: Sequence[str] = ()) -> list[subprocess.Popen[str]]:
    """Start both ranks, the second one behind some words."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        environ = os.environ | {key: str(value) for key, value in place.items()}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [*(around if rank else ()), sys.executable, "-m", "tests.comm.one_of_two", task]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True))
    return ranks


def read_main(ranks: list[subprocess.Popen[str]]) -> Any:
    out, err = ranks[0].communicate(timeout=90)
    assert out.strip(), err
    return json.loads(out.splitlines()[-1])


def test_two_pid_namespaces_of_a_host_are_two_machines_of_one_node() -> None:
    if reason := why_no_nodes():
        pytest.skip(reason)
    ranks = start_ranks("sum", ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"])
    machines, nodes, sent_bytes, is_right = read_main(ranks)
    ranks[1].communicate(timeout=30)
    assert ranks[1].returncode == 0
    assert (machines, nodes, is_right) == ([0, 1], [0, 0], True)
    assert sent_bytes == 2 * 20_000 // 2, "messages: half a vector there and half back"


def test_a_rank_that_never_answers_ends_the_measurement_of_links() -> None:
    ranks = start_ranks("measure")
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
