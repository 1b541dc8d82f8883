"""An advised setting with the time that it would save, and the numbers that several rules need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.finding import Finding
from paceline.profiling.analysis import Profile
from paceline.profiling.intervals import Coverage, Spans, as_spans, intersect, subtract, unite
from paceline.profiling.matching import Meetings
from paceline.profiling.trace import RankTrace, TracedStep
from paceline.units import format_seconds

LEAST_SAVING = 0.05
"""A setting is advised if it saves at least this share of a step."""


@dataclass(frozen=True)
class SettingAdvice:
    """One setting to change.

    Attributes:
        code: of the finding.
        where: the ranks or the line that it concerns.
        setting: its name in PyTorch or in the script, such as `num_workers`.
        value: to set it to.
        was: what it is now.
        saves_ns: by which a step would be shorter.
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
            f"A step would then take about {format_seconds(self.step_ns / 1e9)}, "
            f"{format_seconds(self.saves_ns / 1e9)} less."
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
        self.waiting = Coverage(intersect(subtract(comm, trace.compute), waits))

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

    def predict(self, saves_ns: float) -> tuple[int, int]:
        """Return what a setting saves, at most what the step takes, and what the step would take then.

        Both are of a step that is not recorded: recording can make a step longer by what the setting saves.
        """
        slowdown = max(1.0, self.profile.slowdown or 1.0)
        mean_ns = self.profile.mean_step_ns / slowdown
        saves = max(0.0, min(saves_ns / slowdown, mean_ns))
        return round(saves), round(mean_ns - saves)

    def is_much(self, saves_ns: float) -> bool:
        """Return whether that is enough of a step to be advised."""
        return saves_ns >= LEAST_SAVING * self.profile.mean_step_ns
