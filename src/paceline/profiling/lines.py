"""Finds the line at which a late rank was for longer than the ranks that waited for it.

A sample stands for the time since the one before. Garbage collections have no samples, but each has its line.
A line that every rank passes through for equally long is
not the cause, so the time of the waiting ranks is subtracted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from paceline.profiling.intervals import Coverage
from paceline.profiling.rank_trace import COLLECTION, HOST, CodePlace, RankTrace, TracedStep

# A line is named if it explains this share of what the rank costs, by at least this many samples.
_LEAST_SHARE = 0.3
_LEAST_SAMPLES = 3
# A pause of the sampling thread counts as at most this many usual intervals.
_LONGEST = 4


def find_line(
    phase: str,
    late: RankTrace,
    waiters: Sequence[RankTrace],
    divided: Mapping[int, Mapping[str, Coverage]],
    numbers: set[int],
    lost_ns: float,
) -> CodePlace | None:
    """Return the place to blame; `None` if the samples do not show one.

    Args:
        divided: by rank, when it was in each phase, and when it waited.
        lost_ns: the time to explain in all of these steps.
    """
    has_spans = phase == COLLECTION and len(late.collections) > 0
    counts: dict[CodePlace, int] = {}
    if has_spans:
        times = _add_collections(late, numbers)
        others = [_add_collections(trace, numbers) for trace in waiters]
    else:
        times, counts = add_samples(late, divided[late.rank], phase, numbers)
        others = [add_samples(trace, divided[trace.rank], phase, numbers)[0] for trace in waiters]
    excess = {place: time - fmean(other.get(place, 0.0) for other in others) for place, time in times.items()}
    by_line: dict[CodePlace, float] = {}
    for place, time in excess.items():
        line = CodePlace(place.file, place.line, place.function)
        by_line[line] = by_line.get(line, 0.0) + time
    if not by_line:
        return None
    line = max(by_line, key=lambda each: by_line[each])
    of_line = [p for p in times if (p.file, p.line, p.function) == (line.file, line.line, line.function)]
    if by_line[line] < _LEAST_SHARE * lost_ns:
        return None
    if not has_spans and sum(counts[place] for place in of_line) < _LEAST_SAMPLES:
        return None
    return max(of_line, key=lambda place: excess[place])


def _add_collections(trace: RankTrace, numbers: set[int]) -> dict[CodePlace, float]:
    """Return the time of garbage collections at each place in the chosen steps."""
    times: dict[CodePlace, float] = {}
    steps = [step for step in trace.steps if step.number in numbers]
    for begin_ns, end_ns, number in trace.collections.tolist():
        length = sum(max(0, min(end_ns, s.end_ns) - max(begin_ns, s.begin_ns)) for s in steps)
        if length:
            place = trace.places[number]
            times[place] = times.get(place, 0.0) + length
    return times


def add_samples(
    trace: RankTrace, divided: Mapping[str, Coverage], phase: str, numbers: set[int]
) -> tuple[dict[CodePlace, float], dict[CodePlace, int]]:
    """Return the time at each place in a phase of the chosen steps, and the number of samples."""
    samples = trace.samples[np.argsort(trace.samples[:, 0], kind="stable")]
    if len(samples) < _LEAST_SAMPLES:
        return {}, {}
    instants = samples[:, 0]
    steps: list[TracedStep] = [step for step in trace.steps if step.number in numbers]
    is_in = np.zeros(len(samples), dtype=bool)
    for step in steps:
        is_in |= (step.begin_ns <= instants) & (instants < step.end_ns)
    if phase == HOST:
        for spans in divided.values():
            is_in &= ~spans.covers(instants)
    elif phase in divided:
        is_in &= divided[phase].covers(instants)
    else:
        return {}, {}
    gaps = np.diff(instants, prepend=instants[0])
    gaps[0] = np.median(gaps[1:])
    weights = np.minimum(gaps, _LONGEST * np.median(gaps))
    times: dict[CodePlace, float] = {}
    counts: dict[CodePlace, int] = {}
    for number, weight in zip(samples[is_in, 1].tolist(), weights[is_in].tolist(), strict=True):
        place = trace.places[number]
        times[place] = times.get(place, 0.0) + weight
        counts[place] = counts.get(place, 0) + 1
    return times, counts
