"""`paceline run` brings a rank back that dies twice; all ways to die and to meet: tests/chaos/launcher.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.launcher_cases.restarts import check_one_node, check_two_nodes
from tests.launching.nodes import why_no_nodes

pytestmark = pytest.mark.timeout(100)


@pytest.mark.parametrize(
    ("meeting", "rank", "deaths"),
    [
        ("default", 1, ("raise", "kill")),
        ("static", 0, ("exit", "raise")),
    ],
)
def test_a_rank_comes_back(tmp_path: Path, meeting: str, rank: int, deaths: tuple[str, str]) -> None:
    check_one_node(tmp_path, meeting=meeting, rank=rank, deaths=deaths)


@pytest.mark.parametrize("meeting", ["c10d", "static"])
def test_a_rank_comes_back_on_two_nodes(tmp_path: Path, meeting: str) -> None:
    if reason := why_no_nodes():
        pytest.skip(reason)
    check_two_nodes(tmp_path, meeting=meeting, rank=1, deaths=("kill", "raise"))
