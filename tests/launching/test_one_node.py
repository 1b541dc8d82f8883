"""A job on one node needs its loopback, and nothing else of the network."""

from __future__ import annotations

import socket

import pytest

from paceline.errors import PacelineError
from paceline.launching.elastic.one_node import OneNode
from paceline.launching.ending.endings import RankFailed


def test_the_store_answers_after_the_loopback_was_tried() -> None:
    handler = OneNode("a")
    handler.next_rendezvous().store.set("key", "value")
    assert handler.next_rendezvous().bootstrap_store_info.master_addr == "127.0.0.1"


def test_a_loopback_that_is_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(
        PacelineError, match=r"127\.0\.0\.1: Network is unreachable.*ip link set lo up.*PL344"
    ):
        OneNode("a").next_rendezvous()


def test_a_crash_of_torch_under_detail_is_explained() -> None:
    trace = 'Fatal Python error: Segmentation fault\n\n  File "d.py", line 9 in _ddp_init_helper\n'
    assert "INFO works" in str(RankFailed(1, -11, trace))
    assert "INFO works" not in str(RankFailed(1, -11, trace.replace("_ddp_init_helper", "forward")))
    assert "INFO works" not in str(RankFailed(1, -9, trace))


def test_a_crash_without_a_trace_is_explained_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that are ranks leave no traceback of a crash of torch."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert "INFO works" in str(RankFailed(0, -11))
    assert "INFO works" not in str(RankFailed(0, -9))
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    assert "INFO works" not in str(RankFailed(0, -11))
