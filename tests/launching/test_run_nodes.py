"""`paceline run` on two nodes, which are network namespaces; all cases: tests/chaos/launcher.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos import nodes as chaos
from tests.chaos.launcher_cases.interrupts import check_partitioned, check_waiting
from tests.chaos.launcher_cases.two_nodes import check_cause_is_elsewhere, check_sums, check_unknown_name
from tests.launching.etcd_server import ETCD
from tests.launching.launched import paceline_run
from tests.launching.nodes import why_no_nodes

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(autouse=True, scope="module")
def _nodes_can_be_made() -> None:
    if reason := why_no_nodes():
        pytest.skip(reason)


def test_own_name_that_stands_for_the_loopback(tmp_path: Path) -> None:
    check_sums(tmp_path, meeting="c10d by name", own_name="loopback")


def test_an_endpoint_that_does_not_resolve_is_reported_at_once(tmp_path: Path) -> None:
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "nowhere.invalid:29501"]
    check_unknown_name(tmp_path, words=words)


def test_the_node_of_the_cause_reports_it(tmp_path: Path) -> None:
    check_cause_is_elsewhere(tmp_path, meeting="c10d by address")


def test_a_signal_ends_the_wait_for_a_node(tmp_path: Path) -> None:
    check_waiting(tmp_path, meeting="c10d", node=0, name="SIGINT")


@pytest.mark.slow
def test_a_signal_ends_a_launcher_that_is_cut_off(tmp_path: Path) -> None:
    check_partitioned(tmp_path, meeting="c10d")


def measure(name: str, store: str = "folder") -> chaos.Reading:
    fault = next(fault for fault in chaos.FAULTS if fault.name == name)
    with chaos.Bench(paceline_run, 60, store) as bench:
        reading = bench.measure(fault)
    assert reading.without_s is not None, reading.text
    return reading


def test_the_job_goes_on_without_the_node_of_the_endpoint() -> None:
    reading = measure("number 0 of 2 killed")
    assert reading.lost_steps <= 6, "all since the last save"
    assert re.search("the nodes have changed: node. .* is lost: no beat for 3 s", reading.text)
    assert "restarts left" not in reading.text, "a lost node is no failure of a rank"


@pytest.mark.slow
def test_the_job_goes_on_without_a_node_that_loses_its_power() -> None:
    assert "is lost: no beat for 3 s" in measure("number 0 of 3, power cut").text


@pytest.mark.slow
@pytest.mark.skipif(ETCD is None, reason="needs etcd, in the network that is cut")
def test_the_job_goes_on_without_a_node_that_is_cut_off() -> None:
    assert "is lost: no beat for 3 s" in measure("one of 3 cut off for 8 s", "etcd").text
