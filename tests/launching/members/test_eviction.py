"""Slow nodes are put out of a job, by the decision of its leader, in a simulated network."""

from __future__ import annotations

import logging

import pytest

from tests.launching.members.simulated import Simulation
from tests.launching.members.test_membership import start

WORDS = "rank 1 makes the others wait"


def report(job: Simulation, machine: int, *ranks: int) -> None:
    """The watch of a machine says this of its ranks."""
    launcher = job.launchers[machine]
    launcher.do(lambda: launcher.inner.report_slow(ranks, WORDS))
    job.run(1.0)


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_a_slow_node_leaves_and_the_others_go_on(machine: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    job = start(3, 1)
    report(job, machine, machine)
    assert job.run_until(lambda: job.trains_on(*({0, 1, 2} - {machine})), 5) < 3
    assert job.launchers[machine].evidence == WORDS
    told = [record.getMessage() for record in caplog.records]
    line = f"node{machine} (10.0.0.{machine}) is put out of the job, because it is slow: {WORDS}"
    assert told == [line, line], "each of the others names it, with the evidence"
    for other in {0, 1, 2} - {machine}:
        assert "it was asked to leave" in job.launchers[other].losses[-1]


@pytest.mark.parametrize("machine", [0, 2])
def test_no_node_is_put_out_below_the_minimum(machine: int) -> None:
    job = start(3, 3, 4)
    report(job, machine, machine)
    assert job.trains_on(0, 1, 2)
    assert job.launchers[machine].reasons == ["the job needs 3 nodes, and 2 would be left"]


def test_a_spare_replaces_a_slow_node() -> None:
    job = Simulation(4, 2, 3)
    for machine in range(4):
        job.start(machine)
    job.run_until(lambda: len(job.training()) == 1, 10)
    job.run(5)
    (world,) = job.training()
    assert len(world.members) == 3
    slow = int(world.members[1].name[4:])
    report(job, slow, 1)
    assert job.run_until(lambda: job.trains_on(*({0, 1, 2, 3} - {slow})), 5) < 3


def test_one_node_is_put_out_at_a_time() -> None:
    job = start(4, 1)
    launchers = [job.launchers[machine] for machine in (1, 2)]
    for rank, launcher in enumerate(launchers, 1):
        launcher.do(lambda launcher=launcher, rank=rank: launcher.inner.report_slow((rank,), WORDS))
    job.run(3.0)
    assert job.trains_on(*({0, 1, 2, 3} - {1})) or job.trains_on(*({0, 1, 2, 3} - {2}))
    assert [reason for each in launchers for reason in each.reasons] == ["another node is being put out"]


@pytest.mark.parametrize("machine", [0, 1])
def test_a_rank_that_is_slow_on_the_next_node_too_is_not_the_nodes_fault(machine: int) -> None:
    job = start(3, 1)
    (world,) = job.training()
    rank = world.find(job.launchers[machine].me.key)
    report(job, machine, rank)
    job.run(2.0)
    (world,) = job.training()
    assert len(world.members) == 2
    number = min(rank, 1)
    heir = int(world.members[number].name[4:])
    report(job, heir, rank)
    assert job.training() == [world]
    (reason,) = job.launchers[heir].reasons
    assert reason.startswith(f"rank {rank} was the slow one on node{machine} (10.0.0.{machine}) too")


def test_a_node_that_does_not_train_puts_nobody_out() -> None:
    job = Simulation(3, 1, 2)
    for machine in range(3):
        job.start(machine)
    job.run_until(lambda: len(job.training()) == 1, 10)
    (world,) = job.training()
    (spare,) = {"node0", "node1", "node2"} - {member.name for member in world.members}
    report(job, int(spare[4:]), 0)
    assert job.training() == [world]
    assert job.launchers[int(spare[4:])].is_alive
