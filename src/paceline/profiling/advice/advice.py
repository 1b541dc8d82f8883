"""An advised setting with the time that it would save, and the numbers that several rules need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from paceline.finding import Finding
from paceline.profiling.analysis import Profile
from paceline.profiling.intervals import Coverage, Spans, as_spans, intersect, subtract, unite
from paceline.profiling.matching import MatchedCollective, Meetings
from paceline.profiling.trace import RankTrace, TracedCollective, TracedStep
from paceline.units import format_seconds

LEAST_SAVING = 0.05
"""A setting is advised if it saves at least this share of a step."""
MOST_STEPS = 0.8
"""A pattern counts if it is in at least this share of the steps: one may be unlike the others."""


@dataclass(frozen=True)
class SettingAdvice:
    """One setting to change.

    Attributes:
        code: of the finding.
        where: the ranks or the line that it concerns.
        setting: its name in PyTorch or in the script, such as `num_workers`.
        value: to set it to.
        was: what it is now.
        saves_ns: by which a step of as many samples would be shorter.
        step_ns: what such a step would take then, on average.
        saw, rule, fix: sentences; the fix does not include the time.
        cause: the rank and the phase that are blamed; `None` if it is not about them.
    """

    code: str
    where: str
    setting: str
    value: int | float | bool | str
    was: int | float | bool | str
    saves_ns: int
    step_ns: int
    saw: str
    rule: str
    fix: str
    cause: tuple[int, str] | None = None

    def as_finding(self) -> Finding:
        """Return the finding, with what the setting would bring."""
        return Finding(self.code, self.where, self.saw, self.rule, f"{self.fix} {self.gain}")

    @property
    def gain(self) -> str:
        """The sentence on the time that it saves."""
        return (
            f"A step{' of as many samples' if self.code == 'PL912' else ''} would then take about "
            f"{format_seconds(self.step_ns / 1e9)}, {format_seconds(self.saves_ns / 1e9)} less."
        )


class RankUse:
    """A rank's spans, for many questions.

    Args:
        trace: the rank's.
        steps: the steps to count.
        waits: disjoint spans in which the rank waited for another one.
    """

    def __init__(self, trace: RankTrace, steps: Sequence[TracedStep], waits: Spans) -> None:
        self.trace = trace
        self.steps = tuple(steps)
        comm = unite(as_spans((part.issued_ns, part.end_ns) for part in trace.collectives))
        exposed = subtract(comm, trace.compute)
        self.exposed = Coverage(exposed)
        self.transfer = Coverage(subtract(exposed, waits))
        self.waiting = Coverage(intersect(exposed, waits))
        self.blocked = Coverage(trace.blocked)
        self.served = Coverage(subtract(trace.blocked, waits))
        self.searches = Coverage(trace.searches)
        self.phases = {name: Coverage(spans) for name, spans in trace.phases.items()}
        self._issues = np.array([part.issued_ns for part in trace.collectives], dtype=np.int64)

    def list_parts(self, begin_ns: int, end_ns: int) -> Sequence[TracedCollective]:
        """Return the collectives issued between two instants."""
        first, last = np.searchsorted(self._issues, [begin_ns, end_ns])
        return self.trace.collectives[first:last]

    def list_spans(self, phase: str, step: TracedStep) -> list[tuple[int, int]]:
        """Return the spans of a phase that begin in a step."""
        spans = self.trace.phases.get(phase)
        if spans is None:
            return []
        first, last = np.searchsorted(spans[:, 0], [step.begin_ns, step.end_ns])
        return [(int(begin), int(end)) for begin, end in spans[first:last]]


class RecordedJob:
    """The traces and numbers of a profile, as the rules use them.

    Args:
        traces: of all ranks, by rank.
        profile: theirs.
        meetings: theirs.
    """

    def __init__(self, traces: Sequence[RankTrace], profile: Profile, meetings: Meetings) -> None:
        self.profile = profile
        self.traces = tuple(traces)
        self.matched = meetings.matched
        chosen = set(profile.steps)
        self.uses = tuple(
            RankUse(
                trace,
                [step for step in trace.steps if step.number in chosen],
                unite(as_spans((wait.begin_ns, wait.end_ns) for wait in meetings.waits[trace.rank])),
            )
            for trace in traces
        )

    @property
    def num_steps(self) -> int:
        """The number of steps that all ranks have."""
        return len(self.profile.steps)

    @cached_property
    def arrivals(self) -> Mapping[tuple[str, str, int], MatchedCollective]:
        """The collectives that several ranks have, by the key of their parts."""
        return {next(iter(each.parts.values())).key: each for each in self.matched}

    def measure_services(self, parts: Sequence[TracedCollective]) -> list[int]:
        """Return for how long each of a rank's parts in collectives of one backward or line was served.

        That is from the arrival of the last rank, or from the end of the part served before if that is
        later.
        """
        found, until = [0] * len(parts), 0
        for place in sorted(range(len(parts)), key=lambda place: parts[place].end_ns):
            part = parts[place]
            whole = self.arrivals.get(part.key)
            begin = max(until, part.issued_ns if whole is None else max(part.issued_ns, whole.arrived_ns))
            found[place] = max(0, part.end_ns - begin)
            until = max(until, part.end_ns)
        return found

    def predict(self, saves_ns: float) -> tuple[int, int]:
        """Return what a setting saves, at most what the step takes, and what the step would take then.

        Both are of a step that is not recorded: recording can make a step longer by what the setting saves.
        """
        slowdown = max(1.0, self.profile.slowdown or 1.0)
        mean_ns = self.profile.mean_step_ns / slowdown
        saves = max(0.0, min(saves_ns / slowdown, mean_ns))
        return round(saves), round(mean_ns - saves)

    def is_much(self, saves_ns: float, least: float = LEAST_SAVING) -> bool:
        """Return whether that is enough of a step to be advised."""
        return saves_ns >= least * self.profile.mean_step_ns

    def average(self, values: Sequence[float]) -> float:
        """Return what a step gains if each rank needs less time by these.

        A late rank's own time decides where one is blamed, and the others' is what they do anyway while they
        wait; without one, ranks are late in turn.
        """
        return min(values) if self.profile.blames else fmean(values)


def fit_cost(sizes: Sequence[int], times_ns: Sequence[float]) -> tuple[float, float]:
    """Return nanoseconds per collective and per byte, by least squares; neither is negative.

    Sizes that hardly differ do not separate the two. All of the time then counts per collective.
    """
    mean_ns = fmean(times_ns)
    if max(sizes) < 4 * max(1, min(sizes)):
        return mean_ns, 0.0
    x, y = np.array(sizes, dtype=np.float64), np.array(times_ns, dtype=np.float64)
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    slope = min(max(0.0, slope), mean_ns / float(x.mean()))
    return mean_ns - slope * float(x.mean()), slope
