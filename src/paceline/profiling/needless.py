"""Finds what DDP repeats in vain: the reduction of each microbatch, and the search for unused parameters."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.profiling.intervals import Coverage, as_spans, subtract, unite
from paceline.profiling.rank_trace import BACKWARD, RankTrace, TracedStep

_REDUCTIONS = ("all_reduce", "reduce_scatter")
# A step or two may be unlike the others.
_MOST_STEPS = 0.8


@dataclass(frozen=True)
class Needless:
    """What the steps of a profile repeat in vain.

    Attributes:
        backwards: of a step, each of which reduces the same gradients; 0 if there are not several.
        exposed_ns: per step, of exposed communication in all of these but the last one.
        is_sharded: whether they reduce to shards.
        setting: of DDP, that makes its search for unused parameters unnecessary; empty if it does not search,
            or must.
    """

    backwards: int = 0
    exposed_ns: float = 0.0
    is_sharded: bool = False
    setting: str = ""


def find_needless(traces: Sequence[RankTrace], numbers: Collection[int]) -> Needless:
    """Return what the steps with these numbers repeat."""
    counts, exposed, operations = Counter[int](), [], set()
    for trace in traces:
        comm = unite(as_spans((part.issued_ns, part.end_ns) for part in trace.collectives))
        bare, own = Coverage(subtract(comm, trace.compute)), 0
        for step in trace.steps:
            spans, found = _list_repeated(trace, step)
            if spans and step.number in numbers:
                counts[len(spans)] += 1
                own += sum(bare.measure(*span) for span in spans[:-1])
                operations |= found
        exposed.append(own / len(numbers))
    reducers = [reducer for trace in traces for reducer in trace.reducers if reducer.finds_unused]
    setting = ""
    if reducers and all(reducer.is_constant for reducer in reducers):
        is_used = not any(reducer.unused_bytes for reducer in reducers)
        setting = "find_unused_parameters=False" if is_used else "static_graph=True"
    if counts.total() < _MOST_STEPS * len(numbers) * len(traces):
        return Needless(setting=setting)
    backwards = counts.most_common(1)[0][0]
    return Needless(backwards, fmean(exposed), "reduce_scatter" in operations, setting)


def _list_repeated(trace: RankTrace, step: TracedStep) -> tuple[list[tuple[int, int]], set[str]]:
    """Return the backwards of a step if there are several that all reduce the same, and their operations."""
    pairs = trace.phases.get(BACKWARD, as_spans([])).tolist()
    spans = [(begin, end) for begin, end in pairs if step.begin_ns <= begin < step.end_ns]
    kinds = []
    for begin, end in spans if len(spans) > 1 else ():
        own = trace.collectives
        first, last = (bisect_left(own, at, key=lambda part: part.issued_ns) for at in (begin, end))
        parts = [part for part in own[first:last] if part.operation in _REDUCTIONS]
        kinds.append(Counter((part.group, part.operation, part.num_bytes) for part in parts))
    is_same = bool(kinds and kinds[0]) and all(kind == kinds[0] for kind in kinds)
    return (spans, {operation for _, operation, _ in kinds[0]}) if is_same else ([], set())
