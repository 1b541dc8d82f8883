"""The advice of profiles on simulated programs: the predicted saving against the program with the setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.profiling.advice.advice import SettingAdvice
from paceline.profiling.advice.all import find_advice
from paceline.profiling.analysis import analyse
from paceline.profiling.judge import judge_profile
from paceline.profiling.trace import CORE, FORWARD, RankTrace
from tests.profiling.programs import (
    HERE,
    MS,
    Action,
    Busy,
    Program,
    mean_step,
    run,
    take_step,
)

MOST_OFF = 0.15
"""Of what is simulated, by which a saving may be off here; ranks that are late in turn cost it."""


def advise(traces: Sequence[RankTrace]) -> dict[str, SettingAdvice]:
    return {each.code: each for each in find_advice(traces, analyse(traces))}


def check(advice: SettingAdvice, before: Sequence[RankTrace], after: Sequence[RankTrace]) -> None:
    saved = mean_step(before) - mean_step(after)
    assert advice.saves_ns == pytest.approx(saved, rel=MOST_OFF)
    assert advice.step_ns == pytest.approx(mean_step(before) - advice.saves_ns, abs=2)


@settings(max_examples=10, derandomize=True)
@given(st.integers(2, 5), st.integers(8, 200), st.integers(0, 2**32), st.booleans())
def test_workers_hide_loading(num_ranks: int, data_ms: int, seed: int, is_one_rank: bool) -> None:
    def program(workers: int) -> Program:
        def step(rank: int, number: int, random: Random) -> Sequence[Action]:
            data = data_ms * MS if rank == 0 or not is_one_rank else 0
            # The rest of a batch's loading that the step does not hide.
            left = max(0, data // workers - 34 * MS) if workers else data
            return take_step(random, data=left)

        return step

    before = run(program(0), num_ranks=num_ranks, seed=seed, cores=1.0)
    advice = advise(before)["PL917"]
    assert advice.setting == "num_workers"
    assert isinstance(advice.value, int)
    check(advice, before, run(program(advice.value), num_ranks=num_ranks, seed=seed))


def slow(rank: int, number: int, random: Random) -> Sequence[Action]:
    return take_step(random, data=60 * MS)


def late_in_turn(rank: int, number: int, random: Random) -> Sequence[Action]:
    late = 40 * MS if number % 2 == rank else 0
    return take_step(random, data=MS, forward=MS + late)


def test_workers_are_not_advised_where_they_do_not_help() -> None:
    assert "PL917" in advise(run(slow, cores=1.0))
    # Nothing is promised where it is not known what the cores did, as in traces of others.
    assert "PL917" not in advise(run(slow))
    assert "PL917" not in advise(run(slow, cores=1.0, is_loader_inline=False))
    # Loading computes, and the cores are busy with the step already.
    assert "PL917" not in advise(run(slow, cpu_ns=6 * 95 * MS, cores=1.0))
    # Nor is more promised than all of the loading: ranks that are late in turn stay so.
    assert "PL917" not in advise(run(late_in_turn, cores=1.0))
    half = advise(run(slow, cpu_ns=6 * 95 * MS, cores=1.5))["PL917"]
    assert half.step_ns == pytest.approx(95 / 1.5 * MS, rel=0.05)


@settings(max_examples=8, derandomize=True)
@given(st.integers(2, 5), st.integers(15, 100), st.integers(0, 2**32))
def test_work_is_divided_evenly(num_ranks: int, more_ms: int, seed: int) -> None:
    def program(is_equal: bool) -> Program:
        def step(rank: int, number: int, random: Random) -> Sequence[Action]:
            more = more_ms * MS // num_ranks if is_equal else more_ms * MS * (rank == 0)
            return take_step(random, forward=10 * MS + more)

        return step

    before = run(program(is_equal=False), num_ranks=num_ranks, seed=seed)
    advice = advise(before)["PL913"]
    assert advice.setting == "work per rank"
    assert advice.cause == (0, FORWARD)
    check(advice, before, run(program(is_equal=True), num_ranks=num_ranks, seed=seed))
    findings = judge_profile(analyse(before), [advice])
    assert "Divide the work of a step evenly over the ranks. A step would then take about" in findings[0].fix


@pytest.mark.parametrize("every", [1, 5])
def test_what_one_rank_does_is_done_less_often(every: int) -> None:
    def program(each: int) -> Program:
        def step(rank: int, number: int, random: Random) -> Sequence[Action]:
            is_due = rank == 1 and number % each == each - 1
            return take_step(random, after=[Busy("", 80 * MS)] if is_due else ())

        return step

    before = run(program(every), num_steps=100)
    advice = advise(before)["PL913" if every == 1 else "PL923"]
    assert advice.setting == "every"
    assert HERE in advice.where
    check(advice, before, run(program(10 * every), num_steps=100))
    # Twice as long while it was recorded: what is promised is of the step that is not.
    slower = [replace(trace, slowdown=2.0) for trace in before]
    promised = advise(slower)[advice.code]
    assert promised.saves_ns == pytest.approx(advice.saves_ns / 2, abs=2)
    assert promised.step_ns == pytest.approx(advice.step_ns / 2, abs=2)


def test_a_healthy_job_is_told_nothing() -> None:
    def step(rank: int, number: int, random: Random) -> Sequence[Action]:
        return take_step(random, data=MS // 2, backward=((10 * MS, 1 << 10), (10 * MS, 1 << 10)))

    traces = run(step, num_ranks=4, is_loader_inline=False)
    assert find_advice(traces, analyse(traces)) == []


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
