"""Two launchers on this machine meet in every way in which torchrun's do, also where their clocks differ."""

from __future__ import annotations

import itertools
import re
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launching.launched import Launched, paceline_run, script, torchrun

pytestmark = pytest.mark.timeout(120)
_NAME = socket.gethostname()


def c10d(endpoint: str) -> list[str]:
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "j"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# {node} and {port} are filled in.
WAYS = {
    "c10d by address": c10d("127.0.0.1:{port}"),
    "c10d by localhost": c10d("localhost:{port}"),
    "c10d by own name": c10d(f"{_NAME}:{{port}}"),
    "c10d by IPv6": c10d("[::1]:{port}"),
    "c10d, a range": [*c10d("127.0.0.1:{port}"), "--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=20"],
    "c10d, 2 ranks each": [*c10d("127.0.0.1:{port}"), "--nproc-per-node", "2"],
    "c10d without a port": c10d("localhost"),
    "c10d without an endpoint": ["--rdzv-backend", "c10d"],
    "static": ["--node-rank", "{node}", "--master-addr", "127.0.0.1", "--master-port", "{port}"],
    "static by own name": ["--node-rank", "{node}", "--master-addr", _NAME, "--master-port", "{port}"],
    "static by IPv6": ["--node-rank", "{node}", "--master-addr", "::1", "--master-port", "{port}"],
    "static by endpoint": ["--node-rank", "{node}", "--rdzv-endpoint", "localhost:{port}"],
    "static without an address": ["--node-rank", "{node}"],
}
FIRST, *OTHERS = WAYS


def run_both(folder: Path, commands: list[list[str]]) -> list[tuple[int, str]]:
    """Start both launchers at once; return exit code and output of each."""
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(Launched(folder / str(node), command))
            for node, command in enumerate(commands)
        ]
        return [(job.wait(100), job.text) for job in jobs]


def check_meets(folder: Path, way: str, launcher: Callable[..., list[str]]) -> None:
    port = free_port()
    words = ["--nnodes", "2", *WAYS[way], script("sums.py")]
    ends = run_both(
        folder, [launcher(*(word.format(node=node, port=port) for word in words)) for node in range(2)]
    )
    size = 4 if "2 ranks" in way else 2
    assert [code for code, _ in ends] == [0, 0], ends
    # "sum S on RANK of SIZE, LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ..."
    found = [re.findall(r"sum (\d+) on (\d+) of (\d+), \d+ \d+ (\d+)", text) for _, text in ends]
    total = str(size * (size + 1) // 2)
    places = sorted(tuple(map(int, place)) for place in itertools.chain(*found))
    assert places == [(int(total), rank, size, rank // (size // 2)) for rank in range(size)], ends
    if "static" in way:
        assert [group[0][3] for group in found] == ["0", "1"], "as --node-rank says"


@pytest.mark.parametrize("way", [FIRST, *(pytest.param(way, marks=pytest.mark.slow) for way in OTHERS)])
def test_two_launchers_meet_in_torchruns_ways(way: str, tmp_path: Path) -> None:
    check_meets(tmp_path, way, paceline_run)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_torchruns_meet_in_these_ways(way: str, tmp_path: Path) -> None:
    """Or the table would hold ways that nobody can use."""
    check_meets(tmp_path, way, torchrun)


# ---- clocks


def skewed(off_s: float, folder: Path, *words: str) -> list[str]:
    meeting = ["--nnodes", "2", "--rdzv-backend", "folder", "--rdzv-endpoint", str(folder / "meeting")]
    meeting += ["--rdzv-id", "j", "--local-addr", "localhost"]
    return [sys.executable, script("skewed.py"), str(off_s), *meeting, script("sums.py"), *words]


@pytest.mark.parametrize("off_s", [-60.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_nodes_whose_clocks_differ_train_together(off_s: float, tmp_path: Path) -> None:
    """torch's own reading of heartbeats has one node start alone."""
    # 90 steps of 0.05 s are longer than the 3 s after which a node without a heartbeat is lost.
    ends = run_both(tmp_path, [skewed(off, tmp_path, "90") for off in (0.0, off_s)])
    assert [code for code, _ in ends] == [0, 0], ends
    assert all(re.search(r"sum 3 on \d of 2", text) for _, text in ends), ends
    assert not any("the nodes have changed" in text for _, text in ends), ends
