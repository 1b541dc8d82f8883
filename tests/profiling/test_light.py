"""Phases and computation of a rank without operators, and the line of a late rank."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from paceline.profiling.analysis import analyse
from paceline.profiling.blame import SpentTime, divide_wait, find_error, find_excess
from paceline.profiling.delays import CoreTime
from paceline.profiling.intervals import NOTHING, as_spans
from paceline.profiling.light import divide_loop
from paceline.profiling.rank.loop_phases import WAITING
from paceline.profiling.rank.sampler import choose_pause
from paceline.profiling.rank_trace import (
    BACKWARD,
    COLLECTION,
    CORE,
    DATA,
    FORWARD,
    OPTIMIZER,
    UNSCHEDULED,
    CodePlace,
    RankTrace,
)
from tests.profiling.timelines import MS, simulate


def test_gaps_belong_to_loss_and_clipping() -> None:
    loop = {FORWARD: [(10, 20)], BACKWARD: [(25, 40)], WAITING: [(38, 40)], COLLECTION: [(12, 13)]}
    spans = {name: as_spans(pairs) for name, pairs in loop.items()}
    phases, compute = divide_loop(spans, as_spans([(0, 9)]), as_spans([(45, 50)]))
    assert phases[FORWARD].tolist() == [[10, 25]]
    assert phases[BACKWARD].tolist() == [[25, 40]]
    assert phases[OPTIMIZER].tolist() == [[40, 50]]
    assert phases[DATA].tolist() == [[0, 9]]
    assert phases[COLLECTION].tolist() == [[12, 13]]
    assert compute.tolist() == [[10, 38], [40, 50]]


def test_what_lies_between_other_phases_is_nobodys() -> None:
    """An evaluation's forward has no backward, and data are loaded after an accumulated backward."""
    loop = {FORWARD: as_spans([(0, 10), (30, 40)]), BACKWARD: as_spans([(42, 50)])}
    phases, compute = divide_loop(loop, as_spans([(20, 25), (60, 70)]), NOTHING)
    assert phases[FORWARD].tolist() == [[0, 10], [30, 42]]
    assert phases[BACKWARD].tolist() == [[42, 50]]
    assert not len(phases[OPTIMIZER])
    assert compute.tolist() == [[0, 10], [30, 50]]


def spend(forward: int, delay: int, run: int) -> SpentTime:
    return SpentTime({FORWARD: forward, DATA: 5}, {FORWARD: delay, DATA: 0}, run)


@pytest.mark.parametrize(
    ("late", "causes"),
    [
        # It computes ten times as much, and waits ten times as long for a core: the forward is the cause.
        (spend(1000, 900, 100), {FORWARD: 900}),
        # It computes as much, and waits longer for a core.
        (spend(190, 180, 10), {CORE: 90}),
        # It computes twice as much; half of its waiting is for what both do, and 90 of this are usual.
        (spend(420, 400, 20), {FORWARD: 210, CORE: 110}),
        # Nothing is known of cores.
        (SpentTime({FORWARD: 1000, DATA: 5}), {FORWARD: 900}),
    ],
)
def test_waiting_for_a_core_belongs_to_the_work_that_needs_it(
    late: SpentTime, causes: dict[str, int]
) -> None:
    own = spend(100, 90, 10) if late.run else SpentTime({FORWARD: 100, DATA: 5})
    assert divide_wait(find_excess(own, late), sum(causes.values())) == causes


def test_steps_that_are_alike_count_as_fewer() -> None:
    in_turn, in_runs = [0.0, 10.0] * 6, [0.0] * 6 + [10.0] * 6
    usual = float(np.std(in_turn, ddof=1)) / math.sqrt(12)
    assert find_error(in_turn) < 0.4 * usual
    assert find_error(in_runs) > 1.5 * usual
    assert find_error([3.0] * 12) == 0.0
    assert find_error([0.0, 2.0]) == pytest.approx(1.0)


@pytest.mark.parametrize("late", [{}, {1: (FORWARD, 25 * MS)}])
def test_a_busy_machine_delays_everybody(late: dict[int, tuple[str, int]]) -> None:
    """Each phase of each rank takes up to 24 ms longer by chance, of a step of some 60 ms."""
    found = [analyse(simulate(2, 20, late=late, seed=seed, jitter_ns=24 * MS)).blames for seed in range(60)]
    if not late:
        assert sum(map(bool, found)) <= 1
    else:
        assert sum([(b.rank, b.phase) for b in blames] == [(1, FORWARD)] for blames in found) >= 57


def test_a_rank_that_is_slow_in_all_phases_by_chance_is_named() -> None:
    found = [analyse(simulate(2, 12, spread=(1, 60 * MS), seed=seed)).blames for seed in range(40)]
    assert all(blames and {blame.rank for blame in blames} == {1} for blames in found)


def test_cores_are_measured_between_instants() -> None:
    cores = CoreTime(np.array([[1000, 50, 7], [1100, 90, 57], [1200, 190, 57]]))
    assert cores.measure_run(1050, 1150) == 20 + 50
    assert cores.measure_delay(1050, 1150) == 25
    assert cores.measure_delay(1000, 1200, as_spans([(1010, 1020), (1090, 1190)])) == 5 + 5
    assert CoreTime(UNSCHEDULED).measure_delay(1000, 1200) == 0


def test_a_rank_on_half_a_core_is_named() -> None:
    """Its forward takes 30 ms longer with the same work."""
    traces = simulate(2, 6, late={1: (FORWARD, 30 * MS)})
    found = []
    for trace in traces:
        rows = [(trace.steps[0].begin_ns, 0, 0)]
        for step, (begin, end) in zip(trace.steps, trace.phases[FORWARD].tolist(), strict=True):
            ran, waited = rows[-1][1], rows[-1][2]
            rows.append((begin, ran, waited))
            rows.append((end, ran + 10 * MS, waited + end - begin - 10 * MS))
            rows.append((step.end_ns, ran + 12 * MS, rows[-1][2]))
        found.append(replace(trace, scheduling=np.array(rows)))
    (blame,) = analyse(found).blames
    assert (blame.rank, blame.phase) == (1, CORE)
    # The last 5 ms of the backward hide as much of the wait for the first bucket.
    assert 24.5 * MS <= blame.lost_ns <= 30.5 * MS
    assert analyse(found).rows[-1].core_ns == pytest.approx(30 * MS, rel=0.05)
    (blame,) = analyse([replace(trace, scheduling=UNSCHEDULED) for trace in found]).blames
    assert (blame.rank, blame.phase) == (1, FORWARD)


LOAD, LOOP = CodePlace("train.py", 41, "load"), CodePlace("train.py", 50, "main")


def with_samples(trace: RankTrace) -> RankTrace:
    """Sample each millisecond: a loader's first 2 ms at the loop's line, as on every rank, then in `load`."""
    end = trace.steps[-1].end_ns
    instants = np.arange(trace.steps[0].begin_ns, end, MS) + MS // 2
    data = trace.phases[DATA]
    place = np.maximum(np.searchsorted(data[:, 0], instants, side="right") - 1, 0)
    is_late = (instants >= data[place, 0] + 2 * MS) & (instants < data[place, 1])
    samples = np.stack((instants, np.where(is_late, 0, 1)), axis=1)
    return replace(trace, samples=samples, places=(LOAD, LOOP))


def test_the_line_that_only_the_late_rank_is_at_is_named() -> None:
    traces = [with_samples(trace) for trace in simulate(2, 4, late={1: (DATA, 40 * MS)})]
    (blame,) = analyse(traces).blames
    assert (blame.rank, blame.phase, blame.place) == (1, DATA, LOAD)


def test_few_samples_name_no_line() -> None:
    traces = [with_samples(trace) for trace in simulate(2, 4, late={1: (DATA, 40 * MS)})]
    traces = [replace(trace, samples=trace.samples[::160]) for trace in traces]
    (blame,) = analyse(traces).blames
    assert blame.place is None


def test_a_rank_that_waits_for_a_core_is_sampled_less_often() -> None:
    assert choose_pause(1e-6, 0) == 0.005
    idle = choose_pause(60e-6, 0)
    assert idle == pytest.approx(0.02)
    pause = idle
    for _ in range(50):
        pause = choose_pause(60e-6, round(0.8 * pause * 1e9))
    assert pause == pytest.approx(5 * idle, rel=1e-3)
