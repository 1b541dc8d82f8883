"""Names the cause of waiting: which rank came last, and what it did that the waiting rank did not.

A rank that comes last to a collective may be a victim, of its data, of another rank, of a pause. The method
follows the delay analysis of Böhme, Geimer, Wolf and Arnold ("Identifying the root causes of wait states in
large-scale parallel applications", ICPP 2010): both ranks left an earlier collective together, so the late
rank is late by the phases that took it longer since then. A phase is blamed for its part of the excess.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from paceline.profiling.delays import CoreTime
from paceline.profiling.intervals import Coverage, as_spans, unite
from paceline.profiling.lines import find_line
from paceline.profiling.matching import MatchedCollective, Waiting
from paceline.profiling.rank_trace import CORE, HOST, CodePlace, RankTrace, TracedStep, divide_time

# In a phase of a rank that waited for another one, the other one is the cause.
WAITING = "waiting"
# A rank is blamed if it costs at least this share of the step, after subtracting the cost of the other ranks
# by the same phase: ranks on a busy machine delay each other in turn.
LEAST_SHARE = 0.1
# And if it was late in at least this share of the steps by at least this share of the step.
_LEAST_STEPS, _LEAST_SHARE_OF_STEP = 0.5, 0.05
# A rank that waits less than this share of what another one does waits by chance.
_REGULAR = 0.2
# And if this cost exceeds its standard error over the steps so many times: it is not by chance. Cores are
# missing by chance on a busy machine, now to one rank and then to another, in runs of several steps. So the
# error counts what a step has in common with this many steps before it.
_LEAST_ERRORS, _LEAST_CORE_ERRORS = 5.0, 6.0
_COMMON_STEPS = 3


@dataclass(frozen=True)
class Blame:
    """A cause of waiting.

    Attributes:
        phase: the phase in which it took longer than the ranks that waited.
        lost_ns: mean over the steps of the exposed waiting, of the rank that waited most for this.
        share: of the mean step.
        num_steps: steps in which it was late by this.
        waiters: the ranks that waited.
        gain_ns: per step, what the step would take less without it: other ranks may be almost as late.
        place: the line, and the module, at which it was; `None` if no sample shows one.
    """

    rank: int
    phase: str
    lost_ns: int
    share: float
    num_steps: int
    waiters: tuple[int, ...]
    gain_ns: int = 0
    place: CodePlace | None = None


class _RankTime:
    """A rank's time by phase, without its exposed waiting, and how long it ran and waited for a core."""

    def __init__(self, trace: RankTrace, waits: Sequence[Waiting]) -> None:
        self.begin_ns = trace.steps[0].begin_ns
        self._cores = CoreTime(trace.scheduling)
        spans = unite(as_spans((wait.begin_ns, wait.end_ns) for wait in waits))
        self.parts = {WAITING: Coverage(spans), **divide_time(trace, spans)}

    def measure(self, begin_ns: int, end_ns: int, step: TracedStep) -> SpentTime:
        """Return the nanoseconds between two instants, and for how long the rank ran in a step."""
        window = begin_ns, end_ns
        found = {name: spans.measure(*window) for name, spans in self.parts.items()}
        found[HOST] = max(0, end_ns - begin_ns - sum(found.values()))
        delays = {name: self._cores.measure_delay(*window, spans.spans) for name, spans in self.parts.items()}
        delays[HOST] = max(0, self._cores.measure_delay(*window) - sum(delays.values()))
        del delays[WAITING]  # it had nothing to do
        return SpentTime(found, delays, self._cores.measure_run(step.begin_ns, step.end_ns))


@dataclass(frozen=True)
class SpentTime:
    """The nanoseconds that a rank spent.

    Attributes:
        phases: by phase.
        delays: of these, in which it could run and had no core.
        run: in which it ran on a core in the whole step. The kernel's counters are read a few times per step,
            so this is exact, and the time between two collectives is not.
    """

    phases: Mapping[str, int]
    delays: Mapping[str, int] = field(default_factory=dict)
    run: int = 0


def find_excess(own: SpentTime, late: SpentTime) -> dict[str, int]:
    """Return the nanoseconds that the late rank spent longer than the waiting one, by cause.

    On a busy machine, a phase with more work also waits longer for a core, and that is the phase's. What the
    late rank waits longer for a core with the work that both have is `CORE`.

    Args:
        own: the waiting rank's time since both were together.
    """
    phases = dict(late.phases)
    delay = sum(late.delays.values())
    in_common = min(1.0, own.run / late.run) if late.run else 1.0
    core = max(0.0, delay * in_common - sum(own.delays.values()))
    for name, length in late.delays.items():
        phases[name] -= round(core * length / delay) if delay else 0
    excess = {name: longer for name in phases if (longer := phases[name] - own.phases.get(name, 0)) > 0}
    if core:
        excess[CORE] = round(core)
    return excess


def divide_wait(excess: Mapping[str, int], exposed_ns: int) -> dict[str, int]:
    """Divide a wait by its causes, in proportion to their excess; a larger wait stays unexplained."""
    total = max(exposed_ns, sum(excess.values()))
    return {name: round(exposed_ns * longer / total) for name, longer in excess.items()}


def find_blame(
    traces: Sequence[RankTrace],
    matched: Sequence[MatchedCollective],
    waits: Mapping[int, Sequence[Waiting]],
    numbers: Sequence[int],
) -> tuple[tuple[Blame, ...], str]:
    """Return the causes that cost at least `LEAST_SHARE` of a step, the worst first, and what late ranks did.

    The second is the phase that explains most of all waiting, whoever was late; empty if none does.

    Args:
        matched: their collectives, in order of arrival.
        waits: by rank, in order of issue.
    """
    times = {trace.rank: _RankTime(trace, waits[trace.rank]) for trace in traces}
    shared: dict[tuple[int, int], _Shared] = {}
    steps = {trace.rank: [step for step in trace.steps if step.number in set(numbers)] for trace in traces}
    by_number = {rank: {step.number: step for step in own} for rank, own in steps.items()}
    lost, gained = _Costs(), _Costs()
    for rank, own in waits.items():
        used: dict[tuple[int, int, str], int] = defaultdict(int)
        begins = [step.begin_ns for step in steps[rank]]
        for wait in own:
            place = bisect_right(begins, wait.begin_ns) - 1
            # A pipeline's ranks wait for messages by the order of its stages: that is nobody's fault.
            is_transfer = bool(wait.collective.parts[rank].sequence)
            if is_transfer or not wait.is_certain or place < 0 or wait.begin_ns >= steps[rank][place].end_ns:
                continue
            step = steps[rank][place].number
            last = wait.collective.last
            if (rank, last) not in shared:
                shared[rank, last] = _Shared(rank, last, matched)
            both = steps[rank][place], by_number[last][step]
            start, excess = _explain(wait, times, shared[rank, last], both)
            for phase, length in divide_wait(excess, wait.exposed_ns).items():
                lost.add((last, phase), step, rank, length)
            for phase, length in excess.items():
                # Without it, the late rank would come earlier by this; waits since one start share it.
                gain = max(0, min(length - used[last, start, phase], wait.exposed_ns))
                used[last, start, phase] += gain
                gained.add((last, phase), step, rank, gain)
    mean_ns = sum(s.end_ns - s.begin_ns for own in steps.values() for s in own) / len(traces) / len(numbers)
    found = _choose(lost, gained, mean_ns, numbers, len(traces))
    totals: dict[str, int] = defaultdict(int)
    for (_, phase), by_step in lost.items():
        totals[phase] += sum(sum(by.values()) for by in by_step.values()) if phase != WAITING else 0
    usual = max(totals, key=lambda phase: totals[phase], default="")
    by_rank, divided = (
        {trace.rank: trace for trace in traces},
        {rank: own.parts for rank, own in times.items()},
    )
    blames = tuple(
        replace(
            blame,
            place=find_line(
                blame.phase,
                by_rank[blame.rank],
                [by_rank[rank] for rank in blame.waiters],
                divided,
                set(numbers),
                blame.lost_ns * len(numbers),
            ),
        )
        for blame in found
    )
    return blames, usual


class _Costs(defaultdict[tuple[int, str], dict[int, dict[int, int]]]):
    """Nanoseconds by late rank and phase, by step, and by waiting rank."""

    def __init__(self) -> None:
        super().__init__(dict)

    def add(self, cause: tuple[int, str], step: int, waiter: int, length: int) -> None:
        """Add to a waiting rank's time for a cause."""
        by_waiter = self[cause].setdefault(step, {})
        by_waiter[waiter] = by_waiter.get(waiter, 0) + length


class _Shared:
    """The collectives that two ranks have in common, in order of arrival.

    Args:
        matched: of all ranks, in order of arrival.
    """

    def __init__(self, rank: int, last: int, matched: Sequence[MatchedCollective]) -> None:
        both = [c for c in matched if rank in c.parts and last in c.parts]
        self._arrivals = [c.arrived_ns for c in both]
        self._ends = [(c.parts[rank].end_ns, c.parts[last].end_ns) for c in both]

    def find_start(self, issued_ns: int, arrived_ns: int) -> tuple[int, int] | None:
        """Return when both ranks had left the latest one that ended before they came to another one.

        Args:
            issued_ns, arrived_ns: when `rank` and `last` came to it.
        """
        for place in range(bisect_right(self._arrivals, arrived_ns) - 1, -1, -1):
            end, end_last = self._ends[place]
            if end <= issued_ns and end_last <= arrived_ns:
                return end, end_last
        return None


def _explain(
    wait: Waiting, times: Mapping[int, _RankTime], shared: _Shared, steps: tuple[TracedStep, TracedStep]
) -> tuple[int, dict[str, int]]:
    """Return since when the waiting rank is compared with the late one, and the late one's excess.

    Args:
        times: by rank.
        shared: by both ranks.
        steps: in which it was, on the waiting and on the late rank.
    """
    rank, last = wait.rank, wait.collective.last
    issued, arrived = wait.collective.parts[rank].issued_ns, wait.collective.arrived_ns
    start = shared.find_start(issued, arrived) or (times[rank].begin_ns, times[last].begin_ns)
    own = times[rank].measure(start[0], issued, steps[0])
    return start[0], find_excess(own, times[last].measure(start[1], arrived, steps[1]))


def _choose(
    lost: _Costs,
    gained: _Costs,
    mean_ns: float,
    numbers: Sequence[int],
    num_ranks: int,
) -> tuple[Blame, ...]:
    cost = {key: {step: max(by.values()) for step, by in steps.items()} for key, steps in lost.items()}
    net: dict[tuple[int, str], list[float]] = {}
    for (rank, phase), steps in cost.items():
        others = [own for (other, same), own in cost.items() if same == phase and other != rank]
        if phase != WAITING and num_ranks > 1:
            net[rank, phase] = [
                steps.get(step, 0) - sum(own.get(step, 0) for own in others) / (num_ranks - 1)
                for step in numbers
            ]
    found = []
    for (rank, phase), by_step in net.items():
        steps = cost[rank, phase]
        late = [step for step, lost_ns in steps.items() if lost_ns >= _LEAST_SHARE_OF_STEP * mean_ns]
        if fmean(by_step) < LEAST_SHARE * mean_ns or len(late) < _LEAST_STEPS * len(numbers):
            continue
        # What slows all phases of a rank, such as a thread with Python's lock, is in each of them by chance.
        own = {same: times for (other, same), times in net.items() if other == rank and same != CORE}
        whole = [sum(times) for times in zip(*own.values(), strict=True)]
        is_largest = phase in own and by_step is max(own.values(), key=sum)
        if not (_is_certain(by_step, phase) or (is_largest and _is_certain(whole, phase))):
            continue
        waiters = tuple(sorted({waiter for by in lost[rank, phase].values() for waiter in by}))
        lost_ns = round(sum(steps.values()) / len(numbers))
        gain_ns = _find_gain(lost[rank, phase], gained[rank, phase], len(numbers))
        found.append(Blame(rank, phase, lost_ns, lost_ns / mean_ns, len(late), waiters, gain_ns))
    return tuple(sorted(found, key=lambda blame: -blame.lost_ns))


def _is_certain(values: Sequence[float], phase: str) -> bool:
    least = _LEAST_CORE_ERRORS if phase == CORE else _LEAST_ERRORS
    return len(values) < 2 or fmean(values) >= least * find_error(values)


def find_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of consecutive values, at least 2, that may depend on each other.

    Follows Newey and West, "A simple, positive semi-definite, heteroskedasticity and autocorrelation
    consistent covariance matrix" (Econometrica 1987). Values in turn high and low have a small error, and
    those in long runs a large one.
    """
    number, mean = len(values), fmean(values)
    off = [value - mean for value in values]
    variance = sum(each * each for each in off) / (number - 1)
    for lag in range(1, min(_COMMON_STEPS, number - 2) + 1):
        weight = 1 - lag / (_COMMON_STEPS + 1)
        products = (a * b for a, b in zip(off, off[lag:], strict=False))
        variance += 2 * weight * sum(products) / (number - 1)
    return math.sqrt(max(0.0, variance) / number)


def _find_gain(
    lost: Mapping[int, Mapping[int, int]], gained: Mapping[int, Mapping[int, int]], num_steps: int
) -> int:
    """Return the mean over steps of the least that a rank gains, among those that wait for this regularly."""
    totals: dict[int, int] = defaultdict(int)
    for by in lost.values():
        for waiter, length in by.items():
            totals[waiter] += length
    regular = [waiter for waiter, total in totals.items() if total >= _REGULAR * max(totals.values())]
    return round(sum(min(by.get(waiter, 0) for waiter in regular) for by in gained.values()) / num_steps)
