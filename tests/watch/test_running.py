"""When calls of ranks that go on count as different, from their reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.watch.launcher.clock import Stillness
from paceline.watch.launcher.nodes import NodeState
from paceline.watch.protocol.report import Call, Group, Report
from paceline.watch.protocol.wire import to_json
from paceline.watch.reasoning.running import choose_calls, confirm
from tests.watch.situations import NOW_S, call

Change = dict[str, object]
STILL = Stillness(0.0, 0.0, has_waiting=False)


def series(numbers: Sequence[int], *, late_s: float = 0.0, at: int = 31, **fields: object) -> list[Call]:
    """Completed calls without frames, one each second."""
    made = [call(n, at=at, done=True, **fields) for n in numbers]  # type: ignore[arg-type]
    return [replace(c, began_s=NOW_S + c.number + late_s) for c in made]


# ---- other nodes


def test_a_node_reports_few_calls_of_one_rank_for_each_group() -> None:
    everybody, pair = [Group(name, "", (0, 1)) for name in "01"]
    many = series(range(1, 1001))
    reports = {
        3: replace(
            make_report(3, [*many, *series(range(1, 6), group="1")]), groups={"0": everybody, "1": pair}
        ),
        2: make_report(2, many),
    }
    chosen = choose_calls(reports)
    assert {rank: {c.group for c in report.calls} for rank, report in chosen.items()} == {2: {"0"}, 3: {"1"}}
    assert [c.number for c in chosen[3].calls] == [1, 2, 3, 4, 5]
    assert 16 <= len(chosen[2].calls) <= 64
    assert len(to_json(NodeState("b", (2, 3), STILL, answers=chosen))) < 20_000


@pytest.mark.parametrize("second", [1000, 600])
def test_nodes_that_ask_at_different_times_report_the_same_calls(second: int) -> None:
    here, there = (
        {c.number for c in choose_calls({0: make_report(0, series(numbers))})[0].calls}
        for numbers in (range(1000, 2000), range(1200, 1200 + second))
    )
    assert len(here & there) >= 40
    assert {n for n in here if 1200 <= n < 1200 + second} <= there


@pytest.mark.parametrize("period", [2, 3, 4, 12, 64])
def test_a_choice_has_each_call_of_a_step_before_long(period: int) -> None:
    """Ten times a thousand calls are recorded; one of each step is of interest."""
    told: set[int] = set()
    for first in range(1, 40_000, 4000):
        chosen = choose_calls({0: make_report(0, series(range(first, first + 1000)))})
        told |= {c.number % period for c in chosen[0].calls}
    assert told == set(range(period))


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


@pytest.mark.parametrize(
    ("operation", "here", "there"),
    [
        ("all_reduce", {"op": None}, {"op": "sum"}),
        ("all_reduce", {"sizes": ((4, 2),)}, {"sizes": ((8,),)}),
        ("reduce_scatter", {"sizes": ((4,),)}, {"sizes": ((5,),)}),
        ("scatter", {"sizes": ()}, {"sizes": ((5,),)}),
        ("broadcast", {"peer": None}, {"peer": 1}),
        ("all_reduce", {}, {"operation": "something_new"}),
        ("send", {"peer": 0}, {"operation": "recv", "peer": 1}),
        ("monitored_barrier", {}, {"operation": "all_reduce"}),
    ],
)
def test_what_may_differ_is_not_reported(operation: str, here: Change, there: Change) -> None:
    here, there = {"operation": operation} | here, {"operation": operation} | there
    assert told_of(series(range(4, 7), **here), series(range(4, 7), **there)) == ""


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


def test_one_call_each_is_compared_once_all_ranks_have_ended() -> None:
    reports = {
        0: make_report(0, [call(1, op="sum", age_s=9)]),
        1: make_report(1, [call(1, op="max", age_s=3)]),
    }
    assert confirm(reports) is None  # these may belong to two groups of one name
    verdict = confirm(reports, has_ended=True)
    assert verdict is not None
    assert verdict.code == "PL805"
