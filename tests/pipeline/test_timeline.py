"""Recorded actions become a run that can be compared with a simulation."""

from __future__ import annotations

import re
import time

import pytest

from paceline.pipeline.orders import make_schedule
from paceline.pipeline.picture import draw_panels, draw_times
from paceline.pipeline.schedule import Action, ActionKind
from paceline.pipeline.simulate import Costs, Span, find_formula, simulate
from paceline.pipeline.timeline import Timeline, join_spans, measure_costs

UNEVEN = Costs(forward=[1.0, 2.0], input=[2.0, 3.0], weight=[0.5, 1.5], backward=[2.0, 4.0])


def test_actions_are_recorded_with_the_work_of_the_device() -> None:
    waits: list[float] = []
    timeline = Timeline(lambda: waits.append(time.perf_counter()))
    for number in range(2):
        with timeline.measuring(Action(ActionKind.FORWARD, 0, number)):
            time.sleep(0.01)
    assert [span.action.microbatch for span in timeline.spans] == [0, 1]
    assert len(waits) == 4
    for number, span in enumerate(timeline.spans):
        assert waits[2 * number] <= span.start < span.start + 0.01 <= waits[2 * number + 1] <= span.end


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "dualpipev"])
def test_a_run_that_goes_as_planned_is_simulated_as_it_was(name: str) -> None:
    """The times of a simulation, given as those of a run, give its own costs and idle share back."""
    schedule = make_schedule(name, 2, 6)
    costs = UNEVEN if schedule.num_stages == 2 else Costs(1.0, 2.0, 0.5, [4.0, 5.0, 6.0, 7.0])
    planned = simulate(schedule, costs)
    late = [[Span(s.action, s.start + 7.0, s.end + 7.0) for s in spans] for spans in planned.spans]
    run = join_spans(late)
    assert run.total == pytest.approx(planned.total)
    assert run.idle_share == pytest.approx(planned.idle_share)
    assert run.most_kept == planned.most_kept
    again = simulate(schedule, measure_costs(run))
    assert again.idle_share == pytest.approx(run.idle_share)
    for own, others in zip(again.spans, run.spans, strict=True):
        assert [s.end for s in own] == pytest.approx([s.end for s in others])


def test_what_ranks_wait_beyond_the_plan_shows() -> None:
    planned = simulate(make_schedule("1f1b", 2, 4), UNEVEN)
    last = planned.spans[0][-1]
    spans = [*planned.spans[0][:-1], Span(last.action, last.start + 3.0, last.end + 3.0)]
    run = join_spans([spans, planned.spans[1]])
    assert run.busy == pytest.approx(planned.busy)
    assert run.idle_share == pytest.approx(1 - planned.busy / (2 * (planned.total + 3.0)))


def test_formulas_are_those_of_whole_groups() -> None:
    assert find_formula(make_schedule("1f1b", 4, 8)) == pytest.approx(3 / 11)
    assert find_formula(make_schedule("interleaved", 2, 8, 2)) == pytest.approx(1 / 17)
    assert find_formula(make_schedule("interleaved", 2, 5, 2)) is None
    assert find_formula(make_schedule("zbv", 2, 8)) is None


def test_plan_and_run_are_drawn_to_one_scale() -> None:
    schedule = make_schedule("zero_bubble", 2, 4)
    planned, longer = simulate(schedule, UNEVEN), simulate(schedule, Costs(4.0, 4.0, 4.0))
    lines = draw_times([("planned", planned), ("measured", longer)], 100).splitlines()
    assert [len(lines), lines[0][:8], lines[3][:9]] == [6, "planned:", "measured:"]
    assert f"{longer.idle_share:.1%} idle" in lines[3]
    assert len(lines[1]) < len(lines[4]) <= 100
    assert all(f"A{number}" in lines[4] and f"b{number}'" in lines[5] for number in range(4))
    drawn = draw_panels([("planned", schedule, planned), ("measured", schedule, longer)])
    assert drawn.count("<title>") == 2 * sum(map(len, schedule.actions))
    rights = [
        float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', drawn)
    ]
    (width,) = re.findall(r'<svg [^>]*width="(\d+)"', drawn)
    assert max(rights) <= int(width)
