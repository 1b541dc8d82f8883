"""A recorded step on other ranks, against arithmetic by hand."""

from __future__ import annotations

import pytest

from paceline.plan.cluster import Cluster, Processor, Wire
from paceline.plan.recorded import RecordedStep, change_buckets, project
from paceline.plan.traffic import StepCall

CHIP = Processor("gpu", {4: 1e12}, 1.0, 1e11, 1e12, 0.0)


def cluster(ranks: int, rate: float) -> Cluster:
    return Cluster(1, ranks, CHIP, Wire(0.0, rate), None)


def step(count: int = 4, share: float = 1.0) -> RecordedStep:
    return RecordedStep(2, 1.0, 1.0, 0.6, (StepCall("", "all_reduce", 1e9 / count, 2, count),), share)


def test_what_fits_into_backward_is_hidden_but_the_last_bucket() -> None:
    found = project(step(), cluster(8, 1e10), contention=0.0)
    assert found.comm_s == pytest.approx(2 * 7 / 8 * 1e9 / 1e10)
    assert found.exposed_s == pytest.approx(found.comm_s / 4)
    assert found.step_s == pytest.approx(1 + found.exposed_s)


def test_a_slow_link_exposes_all_but_what_backward_leaves() -> None:
    found = project(step(), cluster(8, 1e9), contention=0.0)
    # The first bucket is ready after a quarter of backward; from then on the stream is busy.
    assert found.exposed_s == pytest.approx(0.15 + 1.75 - 0.6)


def test_communication_outside_of_backward_is_waited_for() -> None:
    found = project(step(share=0.0), cluster(8, 1e10), contention=0.0)
    assert found.exposed_s == pytest.approx(found.comm_s)


def test_one_bucket_hides_nothing_and_bytes_stay() -> None:
    whole = change_buckets(step(), 1e9)
    assert [(call.times, call.num_bytes) for call in whole.calls] == [(1, 1e9)]
    found = project(whole, cluster(8, 1e10), contention=0.0)
    assert found.exposed_s == pytest.approx(found.comm_s)
