"""The agreement of launchers on their rounds, in a simulated network: no clock, no ports, no waiting."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from paceline.launching.members.world import Member, NodeWorld, Waits, has_quorum
from tests.launching.members import simulated
from tests.launching.members.simulated import Simulation


def start(machines: int, least: int, most: int | None = None, **options: Any) -> Simulation:
    """Return a job that trains on all of its machines."""
    simulation = Simulation(machines, least, most or machines, **options)
    for machine in range(machines):
        simulation.start(machine)
    simulation.run_until(lambda: simulation.trains_on(*range(machines)), 10)
    return simulation


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_a_killed_node_is_replaced_by_a_round_of_the_others_at_once(machine: int) -> None:
    job = start(3, 1)
    job.launchers[machine].kill()
    others = {0, 1, 2} - {machine}
    assert job.run_until(lambda: job.trains_on(*others), 5) < 1.5
    for other in others:
        assert job.launchers[other].losses == [
            f"node{machine} (10.0.0.{machine}) is lost: its connection was closed"
        ]


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_a_node_that_falls_silent_is_lost_after_three_seconds(machine: int) -> None:
    job = start(3, 1)
    job.isolate({machine})
    seconds = job.run_until(lambda: job.trains_on(*({0, 1, 2} - {machine})), 10)
    assert 3.0 <= seconds < 6.0
    assert job.launchers[machine].trains is None, "the node that is cut off does not train"


def test_while_nothing_changes_only_the_leader_wakes_by_itself() -> None:
    job = start(3, 1)
    job.run(5)
    launchers = job.launchers.values()
    ticks = {each.machine: each.num_ticks for each in launchers}
    beats = {peer.member.name: peer.beats for peer in job.launchers[0].inner._peers.values()}
    job.run(60)
    ticks = {each.machine: each.num_ticks - ticks[each.machine] for each in launchers}
    assert 100 <= ticks[0] <= 120, "one per beat, which are 0.5 s apart"
    assert ticks[1] == ticks[2] == 0
    after = {peer.member.name: peer.beats for peer in job.launchers[0].inner._peers.values()}
    assert {name: after[name] - beats[name] for name in beats} == {"node1": ticks[0], "node2": ticks[0]}
    assert [each.losses for each in launchers] == [[], [], []]


def test_a_follower_that_hears_no_beat_beats_by_itself() -> None:
    job = start(2, 1)
    job.run(5)
    leader, follower = job.launchers[0].inner, job.launchers[1].inner
    before = follower._beats
    leader._links.send_all = lambda links, message: None  # type: ignore[method-assign]
    job.run(2.5)
    assert leader._peers
    assert follower.role == "following"
    assert 3 <= follower._beats - before <= 4, "every 0.75 s"


@pytest.mark.parametrize("restart_s", [0.3, 3.0])
@pytest.mark.parametrize("machine", [0, 1, 2])
def test_ranks_of_a_node_that_leaves_end_by_themselves(
    machine: int, restart_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "_RESTART_S", restart_s)  # before and after the others have a leader
    job = start(3, 1)
    leaving = job.launchers[machine]
    leaving.inner.leave()
    job.run_until(lambda: job.trains_on(*({0, 1, 2} - {machine})), 5)
    job.run(10)
    assert leaving.losses == [], "they still save"
    assert leaving.trains is not None


@pytest.mark.parametrize("machine", [0, 1])
def test_of_two_nodes_the_other_one_goes_on_where_one_is_known_to_be_dead(machine: int) -> None:
    job = start(2, 1)
    job.launchers[machine].kill()
    assert job.run_until(lambda: job.trains_on(1 - machine), 5) < 1.5


def test_of_two_nodes_that_are_cut_off_only_number_0_goes_on() -> None:
    job = start(2, 1)
    job.isolate({1})
    job.run_until(lambda: job.trains_on(0), 10)
    job.run(70)
    assert job.trains_on(0)
    (error, *_) = job.launchers[1].errors
    assert error.code == "PL374"
    assert "Missing: node0 (10.0.0.0)" in str(error)


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_a_cut_that_heals_brings_the_node_back(machine: int) -> None:
    job = start(3, 1)
    job.isolate({machine})
    job.run(20)
    assert job.trains_on(*({0, 1, 2} - {machine}))
    job.cut.clear()
    assert job.run_until(lambda: job.trains_on(0, 1, 2), 10) < 5


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_a_node_that_was_stopped_comes_back(machine: int) -> None:
    job = start(3, 1)
    job.launchers[machine].stop()
    job.run(20)
    assert job.trains_on(*({0, 1, 2} - {machine}))
    job.launchers[machine].go_on()
    assert job.run_until(lambda: job.trains_on(0, 1, 2), 10) < 5


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_a_node_that_is_started_again_joins(machine: int) -> None:
    job = start(3, 1)
    job.launchers[machine].kill()
    job.run(8)
    job.start(machine)
    assert job.run_until(lambda: job.trains_on(0, 1, 2), 10) < 5


def test_a_world_below_the_minimum_waits_and_names_who_is_missing() -> None:
    job = start(3, 3)
    job.launchers[2].kill()
    job.run(59)
    assert job.training() == []
    assert job.launchers[0].errors == []
    job.run(3)
    (error, *_) = job.launchers[0].errors
    assert error.code == "PL375"
    assert "2 of at least 3 nodes" in str(error)
    assert "Missing: node2 (10.0.0.2), lost 60 s ago" in str(error)


def test_a_job_whose_endpoint_never_comes_says_so() -> None:
    job = Simulation(2, 1, 2)
    job.start(1)
    job.run(61)
    assert [error.code for error in job.launchers[1].errors][:1] == ["PL373"]


def test_nodes_beyond_the_most_wait_as_spares_and_replace_a_lost_one() -> None:
    job = Simulation(4, 2, 3)
    for machine in range(4):
        job.start(machine)
    job.run_until(lambda: len(job.training()) == 1, 10)
    job.run(100)
    (world,) = job.training()
    spare = ({f"node{i}" for i in range(4)} - {member.name for member in world.members}).pop()
    assert job.launchers[int(spare[4:])].errors == [], "a spare waits for as long as the others train"
    for machine in (0, 1):
        job.launchers[machine].kill()
        job.run_until(lambda: len(job.training()) == 1, 5)
    assert job.trains_on(2, 3)


def test_ranks_that_fail_start_again_on_all_nodes() -> None:
    job = start(3, 3)
    for machine in (0, 2):
        (before,) = job.training()
        job.launchers[machine].want_round()
        job.run_until(lambda before=before: job.training() not in ([], [before]), 5)
        assert job.launchers[1].losses[-1] == f"the ranks of node{machine} (10.0.0.{machine}) failed"


def test_a_job_ends_on_all_nodes_when_all_ranks_have_succeeded() -> None:
    job = start(3, 1)
    for launcher in job.launchers.values():
        assert not launcher.has_ended
        launcher.inner.finish()
    job.run(1)
    assert all(launcher.has_ended for launcher in job.launchers.values())


@pytest.mark.parametrize("machine", [0, 1])
def test_a_node_that_leaves_is_not_waited_for(machine: int) -> None:
    job = start(2, 1)
    job.launchers[machine].inner.leave()
    job.launchers[machine].kill()
    assert job.run_until(lambda: job.trains_on(1 - machine), 5) < 1.5
    assert "left: it was asked to leave" in job.launchers[1 - machine].losses[0]


def test_a_node_that_leaves_does_not_end_the_job_for_one_that_asks_it() -> None:
    """Its launcher answers until its ranks have saved; meanwhile the next leader is not heard."""
    job = start(3, 1)
    (world,) = job.training()
    first, second, third = (int(member.name.removeprefix("node")) for member in world.members)
    job.launchers[second].stop()
    job.launchers[first].inner.leave()
    job.run(4)
    assert not job.launchers[third].has_ended
    job.launchers[first].kill()
    job.launchers[second].go_on()
    assert job.run_until(lambda: job.trains_on(second, third), 10) < 5


def test_a_node_with_other_numbers_is_refused() -> None:
    job = Simulation(2, 2, 2)
    job.start(0)
    job.terms = type(job.terms)("job", 1, 2)
    job.start(1)
    job.run(10)
    assert [error.code for error in job.launchers[1].errors][:1] == ["PL376"]
    assert job.training() == []


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ({"torch": "2.12", "a.py": "(1)"}, "node0 (10.0.0.0) runs torch 2.13, and this node runs torch 2.12"),
        ({"torch": "2.13", "a.py": "(2)"}, "runs a.py (1), and this node runs a.py (2)"),
        ({"torch": "2.13", "b.py": "(1)"}, "runs a.py (1), and this node runs b.py (1)"),
        ({"torch": "2.13"}, "runs a.py (1), and this node runs nothing of this"),
    ],
)
def test_a_node_that_runs_something_else_is_refused_by_name(code: dict[str, str], told: str) -> None:
    job = Simulation(2, 2, 2)
    job.terms = replace(job.terms, code={"torch": "2.13", "a.py": "(1)"})
    job.start(0)
    job.terms = replace(job.terms, code=code)
    job.start(1)
    job.run(10)
    (error, *_) = job.launchers[1].errors
    assert error.code == "PL376"
    assert told in error.saw
    assert job.training() == []


def test_the_leader_names_whom_it_has_refused_too(caplog: pytest.LogCaptureFixture) -> None:
    job = Simulation(2, 2, 2)
    job.terms = replace(job.terms, code={"train.py": "1"})
    job.start(0)
    job.terms = replace(job.terms, code={"train.py": "2"})
    job.start(1)
    job.run(62)
    why = "node0 (10.0.0.0) runs train.py 1, and it runs train.py 2"
    told = [r.getMessage() for r in caplog.records]
    assert told.count(f"node1 (10.0.0.1) was refused: {why}") == 1
    (error, *_) = job.launchers[0].errors
    assert error.code == "PL375"
    assert f"Refused: node1 (10.0.0.1): {why}." in error.saw
    assert "use a range such as --nnodes 1:2" in error.fix


def test_a_node_with_another_number_of_ranks_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    job = Simulation(2, 2, 2)
    job.terms = replace(job.terms, nproc=8)
    job.start(0)
    job.terms = replace(job.terms, nproc=4)
    job.start(1)
    job.run_until(lambda: job.trains_on(0, 1), 10)
    (record,) = [r for r in caplog.records if "ranks" in r.getMessage()]
    assert "node1 (10.0.0.1) starts 4 ranks and this node 8 (--nproc-per-node)" in record.getMessage()


def test_a_node_with_a_working_folder_of_its_own_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    job = Simulation(2, 3, 3)
    for node, folder in enumerate(("17", "17", "18")):
        job.terms = replace(job.terms, folder=folder)
        job.start(node)
    job.run_until(lambda: job.trains_on(0, 1, 2), 10)
    (record,) = [r for r in caplog.records if "folder" in r.getMessage()]
    assert "node2 (10.0.0.2) has a working folder of its own" in record.getMessage()


def test_a_job_that_trains_refuses_a_node_that_runs_something_else() -> None:
    job = start(2, 1, 3)
    job.terms = replace(job.terms, code={"a.py": "(1)"})
    other = job.start(2)
    job.run(10)
    assert [error.code for error in other.errors][:1] == ["PL376"]
    assert job.trains_on(0, 1)


def test_a_first_node_that_starts_again_cut_off_does_not_begin_the_job_anew() -> None:
    job = start(3, 1)
    job.isolate({0})
    job.launchers[0].kill()
    job.run_until(lambda: job.trains_on(1, 2), 10)
    again = job.start(0)
    job.run(70)
    assert job.trains_on(1, 2)
    (error, *_) = again.errors
    assert error.code == "PL374"
    assert "node1 (10.0.0.1)" in error.saw
    assert "node2 (10.0.0.2)" in error.saw
    assert "node0" not in error.saw
    assert "another --rdzv-id" in error.fix
    job.cut.clear()
    job.run_until(lambda: job.trains_on(0, 1, 2), 10)


def test_without_its_note_a_first_node_that_is_cut_off_begins_anew() -> None:
    """Or the test above could not fail."""
    job = start(3, 1)
    job.isolate({0})
    job.launchers[0].kill()
    job.run_until(lambda: job.trains_on(1, 2), 10)
    job.note = None
    job.start(0)
    with pytest.raises(AssertionError, match="knows"):
        job.run(20)


def test_a_first_node_that_starts_again_goes_on_alone_if_the_others_have_ended() -> None:
    """Their machines refuse connections to their ports."""
    job = start(3, 1)
    for launcher in job.launchers.values():
        launcher.kill()
    job.start(0)
    job.run_until(lambda: job.trains_on(0), 10)
    assert [world.round for world in job.history] == [1, 2]


def test_all_nodes_that_start_again_meet_in_one_round() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        job = start(3, 1, has_new_ports=True)
        for launcher in job.launchers.values():
            launcher.kill()
        for machine in order:
            job.start(machine)
            job.run(0.5)
        job.run_until(lambda job=job: job.trains_on(0, 1, 2), 10)
        assert [world.round for world in job.history] == [1, 2], "it waits for all, as the first round does"


def test_a_job_that_has_ended_leaves_no_note() -> None:
    job = start(2, 1)
    assert job.note is not None
    for launcher in job.launchers.values():
        launcher.inner.finish()
    job.run(1)
    assert job.note is None


def test_faults_never_let_two_worlds_train() -> None:
    """`Simulation.check` looks after every event."""
    worlds = 0
    for seed in range(10):
        worlds += len(run_faults(seed, 50).history)
    assert worlds > 50, "there were rounds to speak of"


def test_without_the_rule_two_worlds_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above could not fail."""
    monkeypatch.setattr("paceline.launching.members.knowledge.has_quorum", lambda *_, **__: True)
    with pytest.raises(AssertionError, match="knows"):
        run_faults(2, 50)


def test_with_a_witness_either_of_two_nodes_goes_on_without_the_other() -> None:
    """Without one, number 1 waits after a power cut of number 0."""
    for machine in (0, 1):
        job = start(2, 1, has_witness=True)
        job.isolate({machine})
        job.blind.add(machine)
        assert 3.0 < job.run_until(lambda job=job, machine=machine: job.trains_on(1 - machine), 20) < 12.0


def test_of_two_nodes_that_both_reach_the_witness_one_goes_on() -> None:
    job = start(2, 1, has_witness=True)
    (world,) = job.training()
    first = int(world.members[0].name.removeprefix("node"))
    job.isolate({1})
    job.run_until(lambda: job.trains_on(first), 10)
    job.run(50)
    assert job.trains_on(first)
    job.cut.clear()
    job.run_until(lambda: job.trains_on(0, 1), 10)


def test_with_a_witness_a_majority_goes_before_a_minority() -> None:
    job = start(5, 1, has_witness=True)
    job.isolate({0, 1})
    job.run_until(lambda: job.trains_on(2, 3, 4), 10)
    job.run(50)
    assert job.trains_on(2, 3, 4)


def test_a_first_node_that_starts_alone_again_does_not_begin_a_job_that_goes_on_elsewhere() -> None:
    """The limit of a job without a witness."""
    job = start(3, 1, has_witness=True)
    job.isolate({0})
    job.run_until(lambda: job.trains_on(1, 2), 10)
    job.launchers[0].kill()
    job.start(0)
    job.run(50)
    assert job.trains_on(1, 2)
    job.cut.clear()
    job.run_until(lambda: job.trains_on(0, 1, 2), 10)


def test_a_witness_that_is_away_lets_a_round_go_on_and_none_begin() -> None:
    job = start(3, 1, has_witness=True)
    job.blind = {0, 1, 2}
    job.run(100)
    assert job.trains_on(0, 1, 2)
    job.launchers[2].kill()
    job.run(50)
    assert job.training() == []
    job.blind.clear()
    job.run_until(lambda: job.trains_on(0, 1), 5)


def test_all_launchers_may_begin_a_job_that_has_a_witness() -> None:
    for seed in range(20):
        job = Simulation(4, 2, 4, seed=seed, has_witness=True)
        for machine in range(4):
            job.start(machine)
        job.run_until(lambda job=job: job.trains_on(0, 1, 2, 3), 30)


def test_a_job_begins_anew_behind_one_that_has_ended_or_whose_launchers_are_all_dead() -> None:
    job = start(2, 1, has_witness=True)
    for launcher in job.launchers.values():
        launcher.inner.finish()
    job.run(2)
    assert job.record is not None
    assert job.record[-1].is_final
    for _ in range(2):
        for machine in range(2):
            job.launchers[machine].kill()
        for machine in range(2):
            job.start(machine)
        job.run_until(lambda: job.trains_on(0, 1), 30)
        job.run(5)
    rounds = [world.round for world in job.history]
    assert len(rounds) >= 3
    assert rounds == sorted(set(rounds)), "a round never has the number of an earlier job's"


def test_faults_never_let_two_worlds_train_with_a_witness() -> None:
    worlds = 0
    for seed in range(8):
        worlds += len(run_faults(seed, 50, has_witness=True).history)
    assert worlds > 40


def test_without_its_record_two_worlds_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above could not fail."""
    module = "paceline.launching.members"
    monkeypatch.setattr(
        f"{module}.membership.Membership._commit_proposal", lambda self, proposal: self._conclude(proposal)
    )
    with pytest.raises(AssertionError, match="knows"):
        run_faults(6, 50, has_witness=True)


def run_faults(seed: int, count: int, *, has_witness: bool = False) -> Simulation:
    """Kill, cut, stop and return at random; in the end all are back, and train together."""
    chance = random.Random(seed)
    machines = chance.choice([2, 3, 3, 4, 5])
    least = chance.randint(1, machines)
    job = start(machines, least, seed=seed, has_witness=has_witness)
    for _ in range(count):
        job.run(chance.choice([0.01, 0.1, 0.5, 1.0, 3.0, 6.0]))
        machine = chance.randrange(machines)
        launcher = job.launchers[machine]
        faults = ["kill", "cut", "heal", "stop", "back", "fail"]
        fault = chance.choice([*faults, *(["blind", "see"] if has_witness else [])])
        if fault == "kill":
            launcher.kill()
        elif fault == "cut":
            job.isolate({m for m in range(machines) if chance.random() < 0.5})
        elif fault == "heal":
            job.cut.clear()
        elif fault == "blind":
            job.blind.add(machine)
        elif fault == "see":
            job.blind.clear()
        elif fault == "stop":
            launcher.stop()
            job.at(chance.choice([0.5, 4.0]), launcher.go_on)
        elif fault == "back" and not launcher.is_alive:
            job.start(machine)
            job.run(chance.choice([0.0, 3.0]))
        elif fault == "fail" and launcher.is_alive and launcher.trains is not None:
            launcher.want_round()
    job.cut.clear()
    job.blind.clear()
    job.run(10)
    for machine, launcher in job.launchers.items():
        if not launcher.is_alive:
            job.start(machine)
    job.run_until(lambda: job.trains_on(*range(machines)), 60)
    return job


# ---- the rule


def world(*keys: str) -> NodeWorld:
    return NodeWorld(1, tuple(Member(key, key, key, 1) for key in keys))


@pytest.mark.parametrize(
    ("present", "dead", "may"),
    [
        ("abc", "", True),
        ("ab", "", True),
        ("bc", "", True),
        ("a", "", False),
        ("b", "a", True),
        ("c", "b", False),
        ("bc", "a", True),
        ("b", "ac", True),
        ("a", "b", True),
        ("c", "a", False),
        ("", "", False),
        ("xyz", "", False),
    ],
)
def test_the_quorum_of_a_world_of_three(present: str, dead: str, may: bool) -> None:
    assert has_quorum(world("a", "b", "c"), set(present), set(dead)) is may


def test_where_all_are_dead_only_the_launcher_at_the_endpoint_decides() -> None:
    assert has_quorum(world("a", "b"), {"x"}, {"a", "b"}, has_endpoint=True)
    assert not has_quorum(world("a", "b"), {"x"}, {"a", "b"})
    assert not has_quorum(world("a", "b"), {"x"}, {"a"}, has_endpoint=True)


def test_two_disjoint_parts_never_both_have_a_quorum() -> None:
    """For all parts of a world of 5, and all that each may know of those that are dead."""
    keys = "abcde"
    last = world(*keys)
    subsets = [{key for i, key in enumerate(keys) if bits >> i & 1} for bits in range(32)]
    tried = 0
    for first in subsets:
        for second in subsets:
            if first & second or not first or not second:
                continue
            dead = set(keys) - first - second
            for known in subsets:
                for also_known in subsets:
                    if known <= dead and also_known <= dead:
                        tried += 1
                        assert not (has_quorum(last, first, known) and has_quorum(last, second, also_known))
    assert tried > 1000


def test_all_waits_follow_from_one_number() -> None:
    waits = Waits(detect_s=6.0)
    assert (waits.beat_s, waits.probe_s, waits.first_call_s) == (1.0, 3.0, 18.0)
    assert "lost after 6 s" in str(waits)
