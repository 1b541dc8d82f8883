"""Phases and computation of a rank without operators, and the line of a late rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.profiling.analysis import analyse
from paceline.profiling.compare import compare
from paceline.profiling.intervals import NOTHING, as_spans
from paceline.profiling.light import divide_loop
from paceline.profiling.rank.marks import WAITING
from paceline.profiling.trace import (
    BACKWARD,
    COLLECTION,
    DATA,
    FORWARD,
    OPTIMIZER,
    CodePlace,
    RankTrace,
)
from tests.profiling.timelines import MS, simulate


def test_gaps_belong_to_loss_and_clipping() -> None:
    loop = {FORWARD: [(10, 20)], BACKWARD: [(25, 40)], WAITING: [(38, 40)], COLLECTION: [(12, 13)]}
    phases, compute = divide_loop(loop, as_spans([(0, 9)]), as_spans([(45, 50)]))
    assert phases[FORWARD].tolist() == [[10, 25]]
    assert phases[BACKWARD].tolist() == [[25, 40]]
    assert phases[OPTIMIZER].tolist() == [[40, 50]]
    assert phases[DATA].tolist() == [[0, 9]]
    assert phases[COLLECTION].tolist() == [[12, 13]]
    assert compute.tolist() == [[10, 38], [40, 50]]


def test_what_lies_between_other_phases_is_nobodys() -> None:
    """An evaluation's forward has no backward, and data are loaded after an accumulated backward."""
    loop = {FORWARD: [(0, 10), (30, 40)], BACKWARD: [(42, 50)]}
    phases, compute = divide_loop(loop, as_spans([(20, 25), (60, 70)]), NOTHING)
    assert phases[FORWARD].tolist() == [[0, 10], [30, 42]]
    assert phases[BACKWARD].tolist() == [[42, 50]]
    assert not len(phases[OPTIMIZER])
    assert compute.tolist() == [[0, 10], [30, 50]]


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


def test_two_profiles_are_compared() -> None:
    slow, fast = (
        analyse(simulate(2, 8, late={1: (DATA, late)}, seed=seed)) for seed, late in enumerate((40 * MS, 1))
    )
    found = compare(slow, fast)
    rows = {row.name: row for row in found.rows}
    assert -41 * MS < rows["step"].after_ns - rows["step"].before_ns < -39 * MS
    assert rows["step"].low_ns <= rows["step"].after_ns - rows["step"].before_ns <= rows["step"].high_ns
    assert rows["waiting"].high_ns < 0
    # The mean over ranks: only one of the two loads longer.
    assert -21 * MS < rows["data"].after_ns - rows["data"].before_ns < -19 * MS
    assert not rows["forward"].differs
    assert not found.is_slower
    assert compare(fast, slow).is_slower
    assert found.remarks == ()
    assert len(compare(slow, replace(fast, is_light=True, world_size=4)).remarks) == 2
