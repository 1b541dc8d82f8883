"""Two worlds never both train, whatever is lost, late, cut off or stands still; and the job goes on."""

from __future__ import annotations

import pytest

from paceline.errors import PacelineError
from paceline.launching.members.record import JobNode, Record, Terms
from paceline.launching.members.reports import find_hold_s
from tests.launching.members.simulated import WAITS, World


@pytest.mark.parametrize("seed", range(60))
def test_random_faults_never_make_two_worlds(seed: int) -> None:
    """Launchers are killed (also without their ranks), stopped, cut off one way or both, and come back.

    In worlds of more than 8 nodes, only the first node reads the beats of all others.
    """
    world = World((2, 3, 4, 5, 9, 12)[seed % 6], seed)
    draw = world.random
    world.run(10)
    for _ in range(25):
        number = draw.randrange(world.count)
        node = world.nodes[number]
        faults = ["cut", "lost answers", "late", "heal", "stop", "go", "kill", "kill launcher", "start"]
        fault = draw.choice(faults)
        if fault in ("cut", "lost answers", "late", "heal"):
            node.link.fault = "" if fault == "heal" else fault
        elif fault in ("stop", "go"):
            node.stopped = fault == "stop"
        elif fault == "start" and node.dead:
            world.start(number)
        elif fault.startswith("kill") and not node.dead:
            world.kill(number, with_rank=fault == "kill")
        world.run(draw.choice([0.2, 1.0, 3.5, 8.0, 20.0]))
    for number, node in enumerate(world.nodes):
        node.link.fault, node.stopped = "", False
        if node.dead:
            world.start(number)
    world.run(60)
    assert world.size() == world.count, "all train again"


def seconds_without_a_step(world: World, since_s: float) -> float:
    after = [at_s for at_s, _, _ in world.steps if at_s > since_s + 0.5]
    return after[0] - since_s if after else float("inf")


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_others_go_on_soon_when_a_node_is_killed(lost: int) -> None:
    world = World(3)
    world.run(10)
    assert world.size() == 3
    world.kill(lost)
    since_s = world.now
    world.run(10)
    assert world.size() == 2
    gaps = [at_s for at_s, _, size in world.steps if size == 2]
    assert gaps[0] - since_s < WAITS.detect_s + 3


def test_two_of_three_that_are_killed_at_once() -> None:
    world = World(3)
    world.run(10)
    world.kill(0)
    world.kill(1)
    world.run(12)
    assert world.size() == 1


def test_a_job_below_its_minimum_waits() -> None:
    world = World(3, least=2)
    world.run(10)
    world.kill(0)
    world.kill(1)
    world.run(60)
    assert world.size() == 0
    world.start(0)
    world.run(20)
    assert world.size() == 2


def test_ranks_train_on_while_the_store_is_away_for_some_time() -> None:
    world = World(3)
    world.run(10)
    for node in world.nodes:
        node.link.fault = "cut"
    world.run(WAITS.held_s - 1)
    assert world.size() == 3
    for node in world.nodes:
        node.link.fault = ""
    before = world.steps[-1][1]
    world.run(30)
    assert (world.size(), world.steps[-1][1]) == (3, before), "no node was lost"


def test_a_newcomer_waits_for_the_lease_of_a_world_that_it_does_not_belong_to() -> None:
    """The only node of the round is stopped with its rank running: the keeper ends it first."""
    world = World(2)
    world.kill(1)
    world.run(10)
    assert world.size() == 1
    world.nodes[0].stopped = True
    world.start(1)
    world.run(WAITS.lease_s - 3)
    assert world.size() == 0 or world.steps[-1][1] == 1
    world.run(10)
    assert world.size() == 1
    assert world.steps[-1][1] > 1


def test_a_link_that_flaps_costs_less_than_half_of_the_steps() -> None:
    """Down for 2 s in 10."""
    world = World(2)
    world.run(10)
    before = len(world.steps)
    world.run(60)
    undisturbed, before = len(world.steps) - before, len(world.steps)
    for _ in range(6):
        world.nodes[1].link.fault = "cut"
        world.run(2)
        world.nodes[1].link.fault = ""
        world.run(8)
    assert len(world.steps) - before > undisturbed / 2


def test_a_machine_that_was_lost_often_waits_and_is_refused_at_last() -> None:
    assert [find_hold_s(losses) for losses in range(5)] == [0, 0, 10, 30, 90]
    with pytest.raises(PacelineError, match="PL386") as raised:
        find_hold_s(5)
    assert "lost 5 times" in raised.value.saw


def test_losses_count_by_machine_and_forget_a_steady_one() -> None:
    record = Record(nodes={}, numbers={})
    for key, is_steady in (("a", False), ("b", False), ("c", True)):
        record.nodes[key] = JobNode(key, "node1", "10.0.0.1")
        record.remove(key, "no beat for 3 s", is_lost=True, is_steady=is_steady)
        assert record.losses == {"node1 (10.0.0.1)": {"a": 1, "b": 2, "c": 1}[key]}
    assert record.gone["b"] == ("node1 (10.0.0.1)", "no beat for 3 s")


def test_a_node_that_runs_something_else_is_told_what() -> None:
    ours = Terms(1, 2, {"torch": "2.13", "a.py": "(1)"})
    assert ours.compare(Terms(1, 2, dict(ours.code))) == ""
    assert ours.compare(Terms(1, 3, {})) == "the job has --nnodes 1:3, and this node has 1:2"
    other = Terms(1, 2, {"torch": "2.13", "b.py": "(2)"})
    assert ours.compare(other) == "the job runs b.py (2), and this node runs a.py (1)"
