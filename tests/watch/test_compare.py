"""When calls of ranks that go on count as different, from what beats and other nodes tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.watch.launcher.clock import Stillness
from paceline.watch.launcher.nodes import NodeState
from paceline.watch.protocol.report import Call, Group, Report, Seen
from paceline.watch.protocol.wire import from_json, to_json
from paceline.watch.reasoning.compare import Comparison, Prints, confirm, print_call, strip
from tests.watch.situations import NOW_S, call

Change = dict[str, object]


def series(numbers: Sequence[int], *, late_s: float = 0.0, at: int = 31, **fields: object) -> list[Call]:
    """Completed calls without frames, one each second."""
    made = [call(n, at=at, done=True, **fields) for n in numbers]  # type: ignore[arg-type]
    return [replace(c, began_s=NOW_S + c.number + late_s) for c in made]


def compare(*told: tuple[int, list[Call]]) -> bool:
    comparison = Comparison()
    for rank, calls in told:
        comparison.note_calls(rank, [replace(c, frames=()) for c in calls])
    return comparison.is_suspicious(0.0)


# ---- what differs


@pytest.mark.parametrize(
    ("operation", "here", "there"),
    [
        ("all_reduce", {"op": "max"}, {"op": "sum"}),
        ("reduce_scatter", {"op": "max"}, {"op": "sum"}),
        ("all_reduce", {"dtypes": ("int64",)}, {"dtypes": ("float64",)}),
        ("all_gather", {"dtypes": ("int64",)}, {"dtypes": ("float64",)}),
        ("all_reduce", {"sizes": ((4,),)}, {"sizes": ((5,),)}),
        ("broadcast", {"peer": 0}, {"peer": 1}),
        ("broadcast", {}, {"operation": "reduce"}),
        ("gather", {"peer": 1}, {"peer": 0}),
    ],
)
def test_what_differs_is_suspicious(operation: str, here: Change, there: Change) -> None:
    here, there = {"operation": operation} | here, {"operation": operation} | there
    assert compare((0, series([5], **here)), (1, series([5], **there)))
    assert not compare((0, series([5], **here)), (1, series([5], **here)))
    assert not compare((0, series([5], **here)), (1, series([6], **there)))
    assert not compare((0, series([5], **here, group="2")), (1, series([5], **there, group="3")))


@pytest.mark.parametrize(
    ("operation", "here", "there"),
    [
        ("all_reduce", {"op": None}, {"op": "sum"}),
        ("all_reduce", {"sizes": ((4, 2),)}, {"sizes": ((8,),)}),
        ("all_reduce", {"sizes": ((4,), (0,)), "dtypes": ("int64",)}, {"sizes": ((4,),)}),
        ("all_gather", {"sizes": ((4,),)}, {"sizes": ((5,),)}),
        ("reduce_scatter", {"sizes": ((4,),)}, {"sizes": ((5,),)}),
        ("scatter", {"sizes": ()}, {"sizes": ((5,),)}),
        ("broadcast", {"peer": None}, {"peer": 1}),
        ("all_reduce", {}, {"operation": "something_new"}),
        ("send", {"peer": 0}, {"operation": "recv", "peer": 1}),
        ("monitored_barrier", {}, {"operation": "all_reduce"}),
    ],
)
def test_what_may_differ_is_not(operation: str, here: Change, there: Change) -> None:
    here, there = {"operation": operation} | here, {"operation": operation} | there
    assert not compare((0, series([5], **here)), (1, series([5], **there)))


def test_beats_of_different_times_meet_where_their_numbers_do() -> None:
    comparison = Comparison()
    comparison.note_calls(0, series(range(1, 200), op="sum"))
    comparison.note_calls(1, series(range(150, 180), op="sum"))
    comparison.note_calls(2, series(range(190, 300), op="sum"))
    assert not comparison.is_suspicious(0.0)
    comparison.note_calls(1, series(range(190, 195), op="max"))
    assert comparison.is_suspicious(0.0)


def test_a_group_that_starts_again_is_compared_anew() -> None:
    comparison = Comparison()
    comparison.note_calls(0, series(range(1, 50), op="sum"))
    comparison.note_calls(1, series(range(1, 50), op="sum"))
    comparison.note_calls(0, series(range(1, 20), op="max"))
    comparison.note_calls(1, series(range(1, 20), op="max"))
    assert not comparison.is_suspicious(0.0)
    comparison.note_calls(1, series([20], op="max"))
    comparison.note_calls(0, series([20], op="sum"))
    assert comparison.is_suspicious(0.0)


def test_a_suspicion_in_vain_is_followed_by_longer_and_longer_rests() -> None:
    comparison = Comparison()
    rests = []
    now_s = 0.0
    for _ in range(7):
        comparison.note_calls(0, series([5], op="sum"))
        comparison.note_calls(1, series([5], op="max"))
        began_s = now_s
        while not comparison.is_suspicious(now_s):
            now_s += 10.0
        rests.append(now_s - began_s)
        comparison.drop_suspicion(now_s)
        assert not comparison.is_suspicious(now_s + 1000.0)
    assert rests == [0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0]


def test_what_is_kept_is_bounded() -> None:
    comparison = Comparison()
    for first in range(1, 20_000, 200):
        comparison.note_calls(0, series(range(first, first + 200)))
    for group in range(400):
        comparison.note_calls(0, series([1], group=f"g{group}"))
    assert len(comparison._sequences) == 256
    comparison = Comparison()
    for first in range(1, 20_000, 200):
        comparison.note_calls(0, series(range(first, first + 200)))
    assert len(comparison._sequences["0"].calls) == 2048
    comparison.note_calls(1, series([1], op="max"))
    assert not comparison.is_suspicious(0.0)


# ---- other nodes


def travel(state: NodeState) -> NodeState:
    return from_json(NodeState, to_json(state))


def prints_of(rank: int, *told: list[Call]) -> Prints:
    comparison = Comparison()
    for calls in told:
        comparison.note_calls(rank, calls)
    still = Stillness(0.0, 0.0, has_waiting=False)
    return travel(NodeState("node-b", (rank,), still, prints=comparison.read_prints())).prints


def test_nodes_compare_what_they_report_each_other() -> None:
    comparison = Comparison()
    comparison.note_calls(0, series(range(1, 300), op="sum"))
    comparison.note_node(1, prints_of(8, series(range(200, 400), op="sum")))
    assert not comparison.is_suspicious(0.0)
    comparison.note_node(1, prints_of(8, series(range(250, 280), op="max")))
    assert comparison.is_suspicious(0.0)


def test_a_node_reports_its_own_ranks_calls_alone() -> None:
    comparison = Comparison()
    comparison.note_node(1, prints_of(8, series([1, 2], op="sum")))
    assert comparison.read_prints() == {}
    comparison.note_calls(0, series([2, 3], op="sum"))
    assert [told[0] for told in comparison.read_prints()["0"]] == [3, 2]


def test_a_node_reports_little() -> None:
    busy = [series(range(first, first + 200), op="sum") for first in range(1, 2000, 200)]
    many = [series(range(1, 100), group=f"g{n}", op="sum") for n in range(40)]
    for told in (busy, many, [*busy, *many]):
        prints = prints_of(0, *told)
        assert 100 <= sum(len(calls) for calls in prints.values()) <= 128
        assert len(json.dumps(prints)) < 6000
    assert prints_of(0, *busy)["0"][0][0] == 2000


def test_what_is_suspected_travels() -> None:
    report = make_report(0, series(range(1, 600)))
    seen = strip(Seen(2, {}, {0: report}))
    state = NodeState("node-b", (0,), Stillness(0.0, 0.0, has_waiting=False), suspected=seen)
    assert travel(state) == replace(state, prints={})
    assert [c.number for c in seen.reports[0].calls] == list(range(344, 600))


# ---- what the reports have to show


def make_report(rank: int, calls: Sequence[Call], groups: Sequence[str] = ("0",)) -> Report:
    known = {name: Group(name, "", (0, 1)) for name in groups}
    return Report(rank, NOW_S, "running", known, tuple(calls), ())


def told_of(here: list[Call], there: list[Call], groups: Sequence[str] = ("0",)) -> str:
    verdict = confirm({0: make_report(0, here), 1: make_report(1, there, groups)})
    return "" if verdict is None else f"{verdict.code} {verdict.headline} {verdict.more}"


@pytest.mark.parametrize(
    ("code", "here", "there"),
    [("PL805", {"op": "max"}, {"op": "sum"}), ("PL804", {"dtypes": ("int64",)}, {"dtypes": ("float64",)})],
)
def test_reports_confirm(code: str, here: Change, there: Change) -> None:
    told = told_of(
        [*series(range(1, 9)), *series([9], **here), *series([10])],
        [*series(range(1, 9)), *series([9], **there), *series([10])],
    )
    assert told.startswith(code)
    assert "number 9 of world" in told
    assert "they continued" in told


def test_reports_that_fit_report_nothing() -> None:
    assert told_of(series(range(1, 9)), series(range(4, 12))) == ""


def test_a_group_that_was_given_back_on_one_rank_is_left_out() -> None:
    here, there = series(range(1, 9), op="max"), series(range(1, 9), op="sum")
    assert told_of(here, there) != ""
    assert told_of(here, there, groups=()) == ""


def test_groups_of_one_name_that_lived_one_after_the_other_are_left_out() -> None:
    here, there = series(range(1, 9), op="max"), series(range(1, 9), op="sum", late_s=8.0)
    assert told_of(here, there) == ""


def test_groups_of_one_name_with_other_members_are_left_out() -> None:
    # Rank 1 skipped a call of new_group, so its group of all ranks has the name of a pair on rank 0.
    pair, everybody = Group("1", "pair", (0, 2)), Group("1", "everybody", (0, 1, 2))
    reports = {
        rank: replace(
            make_report(rank, series(range(1, 9), group="1", operation=operation)), groups={"1": group}
        )
        for rank, operation, group in (
            (0, "all_reduce", pair),
            (1, "broadcast", everybody),
            (2, "all_reduce", pair),
        )
    }
    assert confirm(reports) is None
    alike = {rank: replace(report, groups={"1": everybody}) for rank, report in reports.items()}
    verdict = confirm(alike)
    assert verdict is not None
    assert verdict.code == "PL802"


def test_sizes_that_some_backend_lets_through_are_left_out() -> None:
    here, there = [series(range(1, 9), operation="all_gather", sizes=((n,),)) for n in (4, 5)]
    assert told_of(here, there) == ""


def test_a_print_states_nothing_of_what_is_not_known() -> None:
    made = print_call(call(operation="gather", sizes=(), peer=None))
    assert made is not None
    assert made[1:] == (0, 0, 0, 0)


def test_one_call_each_is_compared_once_all_ranks_have_ended() -> None:
    reports = {
        0: make_report(0, [call(1, op="sum", age_s=9)]),
        1: make_report(1, [call(1, op="max", age_s=3)]),
    }
    assert confirm(reports) is None  # these may belong to two groups of one name
    verdict = confirm(reports, has_ended=True)
    assert verdict is not None
    assert verdict.code == "PL805"
