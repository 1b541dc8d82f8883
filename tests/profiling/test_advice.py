"""The advice of profiles on simulated programs: the predicted saving against the program with the setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.profiling.advice.advice import SettingAdvice, fit_cost
from paceline.profiling.advice.all import find_advice
from paceline.profiling.analysis import analyse
from paceline.profiling.judge import judge_profile
from paceline.profiling.trace import BACKWARD, CORE, FORWARD, OPTIMIZER, RankTrace, Reducer
from tests.profiling.programs import (
    HERE,
    MS,
    SHARED,
    Action,
    Busy,
    Issue,
    Program,
    Wait,
    mean_step,
    run,
    take_step,
)

MOST_OFF = 0.15
"""Of what is simulated, by which a saving may be off here; ranks that are late in turn cost it."""
KIB = 1 << 10


def advise(traces: Sequence[RankTrace]) -> dict[str, SettingAdvice]:
    return {each.code: each for each in find_advice(traces, analyse(traces))}


def check(
    advice: SettingAdvice, before: Sequence[RankTrace], after: Sequence[RankTrace], samples: int = 1
) -> None:
    saved = mean_step(before) - mean_step(after) / samples
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


def accumulate(is_always: bool, microbatches: int = 4) -> Program:
    def step(rank: int, number: int, random: Random) -> Sequence[Action]:
        actions: list[Action] = []
        for microbatch in range(microbatches):
            is_last = microbatch == microbatches - 1
            actions += [Busy(FORWARD, 5 * MS + random.randint(0, MS // 10)), Busy(BACKWARD, 10 * MS)]
            if is_last or is_always:
                actions += [Issue(8 << 20), Wait(BACKWARD)]
        return [*actions, Busy(OPTIMIZER, 2 * MS)]

    return step


@settings(max_examples=8, derandomize=True)
@given(st.integers(2, 5), st.integers(2, 8), st.integers(0, 2**32))
def test_one_reduction_per_step_is_enough(num_ranks: int, microbatches: int, seed: int) -> None:
    before = run(accumulate(is_always=True, microbatches=microbatches), num_ranks=num_ranks, seed=seed)
    after = run(accumulate(is_always=False, microbatches=microbatches), num_ranks=num_ranks, seed=seed)
    advice = advise(before)
    assert advice["PL918"].setting == "no_sync"
    assert f"each of the {microbatches} backwards" in advice["PL918"].saw
    check(advice["PL918"], before, after)
    assert "PL912" not in advice  # it is known only afterwards what the last reduction costs
    assert "PL918" not in advise(after)


def test_two_models_are_no_accumulation() -> None:
    """A generator and a discriminator reduce different gradients."""

    def step(rank: int, number: int, random: Random) -> Sequence[Action]:
        return [*take_step(random)[:-1], *take_step(random, data=0, backward=((9 * MS, 2 << 20),))]

    assert "PL918" not in advise(run(step))


@settings(max_examples=8, derandomize=True)
@given(st.integers(2, 5), st.integers(8, 64), st.integers(0, 2**32))
def test_two_steps_share_a_reduction(num_ranks: int, mib: int, seed: int) -> None:
    def step(rank: int, number: int, random: Random) -> Sequence[Action]:
        return take_step(random, backward=((10 * MS, mib << 20),))

    def joined(rank: int, number: int, random: Random) -> Sequence[Action]:
        first = [a for a in take_step(random, backward=((10 * MS, 0),)) if isinstance(a, Busy)]
        return [*first, *take_step(random, backward=((10 * MS, mib << 20),))]

    before = run(step, num_ranks=num_ranks, seed=seed)
    advice = advise(before)["PL912"]
    assert (advice.setting, advice.value) == ("accumulation", 2)
    check(advice, before, run(joined, num_ranks=num_ranks, seed=seed), samples=2)


def test_gradients_summed_one_by_one() -> None:
    def program(number_of: int) -> Program:
        def step(rank: int, number: int, random: Random) -> Sequence[Action]:
            forward = [a for a in take_step(random) if isinstance(a, Busy) and a.phase != OPTIMIZER]
            sums = [Issue(320 * KIB // number_of, at=HERE), Wait(OPTIMIZER)] * number_of
            return [*forward, Busy(OPTIMIZER, MS // 100), *sums, Busy(OPTIMIZER, MS)]

        return step

    before = run(program(40), reducers=())
    advice = advise(before)["PL922"]
    assert (advice.where, advice.was) == (HERE, 40)
    check(advice, before, run(program(1), reducers=()))
    assert "PL922" not in advise(run(program(1), reducers=()))


@pytest.mark.parametrize("is_used", [True, False])
def test_the_search_for_unused_parameters(is_used: bool) -> None:
    def program(is_on: bool) -> Program:
        def step(rank: int, number: int, random: Random) -> Sequence[Action]:
            actions = take_step(random)
            if is_on:
                actions.insert(2, Busy(FORWARD, 4 * MS, is_search=True))
                actions.insert(-2, Issue(4 * 500))
            return actions

        return step

    on = Reducer(500, finds_unused=True, unused_bytes=0 if is_used else 64, is_constant=True)
    before = run(program(is_on=True), reducers=[on])
    advice = advise(before)["PL920"]
    expected = ("find_unused_parameters", False) if is_used else ("static_graph", True)
    assert (advice.setting, advice.value) == expected
    check(advice, before, run(program(is_on=False)))
    # Steps that used different parameters need the search.
    changing = Reducer(500, finds_unused=True, unused_bytes=64, is_constant=False)
    assert "PL920" not in advise(run(program(is_on=True), reducers=[changing]))
    assert "PL920" not in advise(run(program(is_on=False), reducers=[SHARED]))


@pytest.mark.parametrize("operation", ["barrier", "all_reduce"])
def test_a_collective_of_the_loop(operation: str) -> None:
    def program(every: int) -> Program:
        def step(rank: int, number: int, random: Random) -> Sequence[Action]:
            after = [Busy("", MS // 100), Issue(4 << 20, operation, HERE), Wait("")]
            return take_step(random, after=after if number % every == 0 else ())

        return step

    before = run(program(1), num_steps=50)
    advice = advise(before)["PL921"]
    assert (advice.where, advice.setting) == (HERE, "barrier" if operation == "barrier" else "every")
    after = run(program(10**6 if operation == "barrier" else int(advice.value)), num_steps=50)
    if operation == "barrier":
        after = run(lambda rank, number, random: take_step(random), num_steps=50)
    check(advice, before, after)
    assert "PL921" not in advise(run(program(4), num_steps=50))


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
    traces = run(step, num_ranks=4)
    assert find_advice(traces, analyse(traces)) == []


def test_costs_are_fitted() -> None:
    assert fit_cost([0, 100, 200], [10.0, 20.0, 30.0]) == pytest.approx((10.0, 0.1))
    assert fit_cost([100, 101], [10.0, 30.0]) == (20.0, 0.0)
    assert fit_cost([1, 100, 200], [30.0, 20.0, 10.0]) == (20.0, 0.0)


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
