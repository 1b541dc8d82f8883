"""Unusual recordings: one rank, no collective, very long and very short steps, a clock that was set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from paceline.cli.profile_report import describe_profile
from paceline.errors import PacelineError
from paceline.profiling.analysis import analyse
from paceline.profiling.intervals import Spans
from paceline.profiling.judge import judge_profile
from paceline.profiling.rank_trace import BACKWARD, CORE, FORWARD, OPTIMIZER, RankTrace, Reducer, TracedStep
from paceline.profiling.read import align
from tests.profiling.programs import Action, Busy, Issue, Program, Wait, run, take_step
from tests.profiling.timelines import MS, simulate


def report(traces: Sequence[RankTrace]) -> str:
    traces = align(traces)
    profile = analyse(traces)
    return describe_profile(profile, judge_profile(profile))


def test_one_rank_has_nobody_to_wait_for() -> None:
    text = report(simulate(1, 4))
    assert text.startswith("rank 0 of 1, steps 1 to 4: 37.")
    assert "PL91" not in text


def test_without_a_collective_there_is_no_communication() -> None:
    text = report([replace(trace, collectives=()) for trace in simulate(2, 4)])
    assert "no collectives" in text
    assert "exposed communication: 0.0% of the step (good)" in text
    assert "PL9" not in text


@pytest.mark.parametrize(
    ("forward", "backward", "words"), [(300_000 * MS, 20 * MS, "300025 ms"), (MS // 2, MS // 2, "4.0 ms")]
)
def test_steps_of_minutes_and_of_milliseconds(forward: int, backward: int, words: str) -> None:
    def step(rank: int, number: int, random: Random) -> Sequence[Action]:
        return take_step(
            random, data=0 if forward < MS else 2 * MS, forward=forward, backward=((backward, 9),), jitter=0
        )

    assert f"{words} per step (median)" in report(run(step))


@pytest.mark.parametrize("by_ns", [2_000 * MS, -2_000 * MS, -20 * MS])
def test_a_clock_that_was_set_is_one_message(by_ns: int) -> None:
    """Only one of two machines: ranks of one machine have one clock."""
    first, other = simulate(2, 6)
    at = other.steps[3].begin_ns

    def move(instant: int) -> int:
        return instant + by_ns if instant >= at else instant

    def move_spans(spans: Spans) -> Spans:
        return np.array([[move(begin), move(end)] for begin, end in spans.tolist()], dtype=np.int64)

    steps = [TracedStep(step.number, move(step.begin_ns), move(step.end_ns)) for step in other.steps]
    jumped = replace(
        other,
        host="b",
        steps=tuple(step for step in steps if step.end_ns > step.begin_ns),
        phases={name: move_spans(spans) for name, spans in other.phases.items()},
        compute=move_spans(other.compute),
        collectives=tuple(
            replace(part, issued_ns=move(part.issued_ns), end_ns=move(part.end_ns))
            for part in other.collectives
        ),
    )
    with pytest.raises(PacelineError, match=r"a machine's clock was set while it recorded.*\[PL904\]"):
        report([replace(first, host="a"), jumped])


def slow(rank: int, number: int, random: Random) -> Sequence[Action]:
    return take_step(random, data=60 * MS)


def late_in_turn(rank: int, number: int, random: Random) -> Sequence[Action]:
    late = 40 * MS if number % 2 == rank else 0
    return take_step(random, data=MS, forward=MS + late)


def test_a_loop_that_loads_its_batches_itself_should_have_workers() -> None:
    text = report(run(slow))
    assert "ranks 0 and 1: the loop waits while it loads each batch itself, for 6" in text
    assert "Set num_workers=2 in the DataLoader" in text
    assert "PL917" not in report(run(slow, is_loader_inline=False))
    assert "PL917" not in report(run(late_in_turn))


def accumulate(is_always: bool) -> Program:
    def step(rank: int, number: int, random: Random) -> Sequence[Action]:
        actions: list[Action] = []
        for microbatch in range(4):
            actions += [Busy(FORWARD, 5 * MS + random.randint(0, MS // 10)), Busy(BACKWARD, 10 * MS)]
            if microbatch == 3 or is_always:
                actions += [Issue(8 << 20), Wait(BACKWARD)]
        return [*actions, Busy(OPTIMIZER, 2 * MS)]

    return step


def test_one_reduction_per_step_is_enough() -> None:
    before, after = run(accumulate(is_always=True)), run(accumulate(is_always=False))
    profile = analyse(before)
    text = report(before)
    assert "reduced in each of the 4 backwards" in text
    assert "with model.no_sync():" in text
    saved = profile.mean_step_ns - analyse(after).mean_step_ns
    assert saved == pytest.approx(profile.needless.exposed_ns, rel=0.1)
    assert "PL918" not in report(after)


def test_two_models_are_no_accumulation() -> None:
    """A generator and a discriminator reduce different gradients."""

    def step(rank: int, number: int, random: Random) -> Sequence[Action]:
        return [*take_step(random)[:-1], *take_step(random, data=0, backward=((9 * MS, 2 << 20),))]

    assert "PL918" not in report(run(step))


@pytest.mark.parametrize(
    ("reducer", "setting"),
    [
        (Reducer(True, 0, True), "find_unused_parameters=False"),
        (Reducer(True, 64, True), "static_graph=True"),
        (Reducer(True, 64, False), ""),
        (Reducer(False, 0, True), ""),
    ],
)
def test_a_search_for_unused_parameters_that_finds_nothing_new(reducer: Reducer, setting: str) -> None:
    text = report(run(slow, reducers=[reducer]))
    assert ("[PL920]" in text) == bool(setting)
    assert setting in text


def test_equal_work_is_advised_only_where_work_differed() -> None:
    """Ranks that are late in turn, once by their forward and once because others had the cores."""
    profile = replace(analyse(run(late_in_turn)), blames=())
    assert profile.usual_delay == FORWARD
    moves = {
        phase: next(f.fix for f in judge_profile(replace(profile, usual_delay=phase)) if f.code == "PL910")
        for phase in (FORWARD, CORE)
    }
    assert "equal work" in moves[FORWARD]
    assert "equal work" not in moves[CORE]
    assert "fewer threads" in moves[CORE]
