"""Computes from the traces of all ranks where the time of each step went, and who waited for whom."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from paceline.errors import PacelineError
from paceline.phrases import name_ranks
from paceline.profiling.blame import Blame, find_blame
from paceline.profiling.delays import CoreTime
from paceline.profiling.intervals import NOTHING, Coverage, Spans, as_spans, measure, subtract, unite
from paceline.profiling.matching import Key, MatchedCollective, Waiting, find_meetings
from paceline.profiling.needless import Needless, find_needless
from paceline.profiling.rank_trace import (
    BACKWARD,
    DATA,
    FORWARD,
    HOST,
    OPTIMIZER,
    PHASES,
    READING,
    TRANSFERS,
    RankTrace,
    TracedCollective,
    TracedStep,
    divide_time,
)

BETWEEN, WITHIN = "between nodes", "within a node"
IDLE_SYNC, IDLE_DATA, IDLE_LAUNCH, IDLE_HOST = "synchronisation", "data", "launches", "other code"
# From the end of a wait to the begin of the gap: the device ends its work a little earlier.
_AFTER_SYNC_NS = 20_000


@dataclass(frozen=True)
class Traffic:
    """The collectives of one operation of a group in a step of a rank, issued by one line.

    Attributes:
        group: its name.
        operation: such as `all_reduce`.
        count: how many the rank issued in the step.
        num_bytes: their inputs; `None` if some size is unknown.
        busy_ns: for how long at least one of them was under way in the step.
        at: the user's line; empty if unknown.
        links: `"between nodes"` or `"within a node"`; empty if all ranks are on one node.
    """

    group: str
    operation: str
    count: int
    num_bytes: int | None
    busy_ns: int
    at: str = ""
    links: str = ""


@dataclass(frozen=True)
class RankStep:
    """The time of one step of a rank, in nanoseconds.

    Attributes:
        rank: global.
        step: number.
        total_ns: duration.
        phases: by name, and the rest as `host`; they add up to the total.
        compute_ns: in which it computed.
        comm_ns: in which a collective was under way, from its issue to its end.
        exposed_ns: in which one was under way, and it did not compute.
        waiting_ns: of the exposed time, by the rank that it waited for.
        backward_comm_ns: of the backward, in which a collective was under way.
        traffic: by group and operation.
        core_ns: in which it could run and had no core.
        by_links: in which a collective was under way, and exposed, `"between nodes"` and `"within a node"`;
            empty if all ranks are on one node.
        idle: in which its GPU did nothing, by cause, see `_explain_idle`; empty on CPU.
        copies_ns: in which its GPU copied or filled memory.
        num_kernels: that began in the step, without those of NCCL.
    """

    rank: int
    step: int
    total_ns: int
    phases: Mapping[str, int]
    compute_ns: int
    comm_ns: int
    exposed_ns: int
    waiting_ns: Mapping[int, int]
    backward_comm_ns: int
    traffic: tuple[Traffic, ...]
    core_ns: int = 0
    by_links: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    idle: Mapping[str, int] = field(default_factory=dict)
    copies_ns: int = 0
    num_kernels: int = 0

    @property
    def idle_ns(self) -> int:
        """The time in which its GPU did nothing."""
        return sum(self.idle.values())


@dataclass(frozen=True)
class Profile:
    """The time of the recorded steps, by rank and phase.

    Attributes:
        world_size: ranks of the job; the traces may be of fewer.
        ranks: those with a trace.
        steps: the numbers of the steps that all of these have.
        rows: one per rank and step.
        blames: who kept others waiting, and with what, the worst first.
        inline_ranks: those whose loop loads its batches itself, without workers.
        needless: what their DDP repeats in vain.
        usual_delay: the phase in which late ranks took longer most, whoever was late; empty if unknown.
        num_matched: collectives found on at least two ranks.
        num_unmatched: parts of collectives found on one rank only, in the common steps.
        num_uncertain: waits that are shorter than the error of the clocks.
        clock_error_ns: the largest error of a rank's clock.
        slowdown: how much longer steps took while recorded, the largest over ranks; `None` if unknown.
        remarks: facts that limit the conclusions.
    """

    world_size: int
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    rows: tuple[RankStep, ...]
    blames: tuple[Blame, ...]
    num_matched: int
    num_unmatched: int
    num_uncertain: int
    clock_error_ns: int
    slowdown: float | None
    remarks: tuple[str, ...] = field(default=())
    usual_delay: str = ""
    inline_ranks: tuple[int, ...] = ()
    needless: Needless = field(default_factory=Needless)

    def step_ns(self, step: int) -> int:
        """Return the duration of a step: that of the rank that took longest."""
        return self._step_ns[step]

    @property
    def median_step(self) -> int:
        """The step of median duration, the shorter of two."""
        return sorted(self.steps, key=self.step_ns)[(len(self.steps) - 1) // 2]

    @property
    def worst_step(self) -> int:
        """The longest step."""
        return max(self.steps, key=self.step_ns)

    @property
    def mean_step_ns(self) -> float:
        """The mean duration of a step over ranks and steps."""
        return sum(row.total_ns for row in self.rows) / len(self.rows)

    @cached_property
    def exposed_rank(self) -> int:
        """The rank with the largest exposed share."""
        return max(self.ranks, key=lambda rank: self._exposed_shares[rank])

    @property
    def exposed_share(self) -> float:
        """The share of that rank's time in which a collective was under way and it did not compute."""
        return self._exposed_shares[self.exposed_rank]

    @cached_property
    def idle_rank(self) -> int:
        """The rank whose GPU was idle for longest."""
        idle = Counter[int]()
        for row in self.rows:
            idle[row.rank] += row.idle_ns
        return max(self.ranks, key=lambda rank: idle[rank])

    def idle_shares(self) -> dict[str, float]:
        """Return the shares of that rank's time in which its GPU was idle, by cause, the largest first."""
        rows = [row for row in self.rows if row.rank == self.idle_rank]
        total, found = sum(row.total_ns for row in rows), Counter[str]()
        for row in rows:
            found.update(row.idle)
        return {cause: length / total for cause, length in found.most_common() if length}

    @property
    def overlap(self) -> float | None:
        """The share of communication that computation hides; `None` without communication."""
        comm_ns = self._add("comm_ns")
        return 1 - self._add("exposed_ns") / comm_ns if comm_ns else None

    @property
    def waiting_share(self) -> float:
        """The share of that rank's time that is exposed waiting for other ranks."""
        rows = [row for row in self.rows if row.rank == self.exposed_rank]
        return sum(sum(row.waiting_ns.values()) for row in rows) / sum(row.total_ns for row in rows)

    @property
    def backward_comm_share(self) -> float | None:
        """The share of all backwards with a collective under way; `None` without a backward."""
        backward_ns = sum(row.phases.get(BACKWARD, 0) for row in self.rows)
        return self._add("backward_comm_ns") / backward_ns if backward_ns else None

    # Indexed by rank and step in one pass over the rows, because a job may have thousands of both.

    @cached_property
    def _exposed_shares(self) -> dict[int, float]:
        exposed, total = Counter[int](), Counter[int]()
        for row in self.rows:
            exposed[row.rank] += row.exposed_ns
            total[row.rank] += row.total_ns
        return {rank: exposed[rank] / total[rank] for rank in self.ranks}

    @cached_property
    def _step_ns(self) -> dict[int, int]:
        longest: dict[int, int] = {}
        for row in self.rows:
            longest[row.step] = max(longest.get(row.step, 0), row.total_ns)
        return longest

    def _add(self, name: str) -> int:
        return sum(int(getattr(row, name)) for row in self.rows)


def analyse(traces: Sequence[RankTrace]) -> Profile:
    """Return where the time went in the steps that all traces have."""
    traces = sorted(traces, key=lambda trace: trace.rank)
    numbers = _find_common(traces)
    meetings = find_meetings(traces)
    matched, waits, num_unlike = meetings.matched, meetings.waits, meetings.num_unlike
    if num_unlike > len(matched):
        raise contradiction_error(
            [trace.rank for trace in traces],
            f"{num_unlike} collectives of the same group and number are different operations",
        )
    blames, usual_delay = find_blame(traces, matched, waits, sorted(numbers))
    rows, links = [], _find_links(traces, matched)
    for trace in traces:
        chosen = [step for step in trace.steps if step.number in numbers]
        rows += _measure_steps(trace, chosen, meetings.compute[trace.rank], waits[trace.rank], links)
    return Profile(
        world_size=max(trace.world_size for trace in traces) or len(traces),
        ranks=tuple(trace.rank for trace in traces),
        steps=tuple(sorted(numbers)),
        rows=tuple(rows),
        blames=blames,
        usual_delay=usual_delay,
        needless=find_needless(traces, numbers),
        inline_ranks=tuple(trace.rank for trace in traces if trace.is_loader_inline),
        num_matched=len(matched),
        num_unmatched=_count_unmatched(traces, matched, numbers),
        num_uncertain=sum(
            wait.exposed_ns > 0 and not wait.is_certain for own in waits.values() for wait in own
        ),
        clock_error_ns=max(trace.clock_error_ns for trace in traces),
        slowdown=max((trace.slowdown for trace in traces if trace.slowdown is not None), default=None),
        remarks=tuple(dict.fromkeys(remark for trace in traces for remark in trace.remarks)),
    )


def _find_common(traces: Sequence[RankTrace]) -> set[int]:
    numbers = set.intersection(*({step.number for step in trace.steps} for trace in traces))
    if numbers:
        return numbers
    without = [trace.rank for trace in traces if not trace.steps]
    if without:
        raise PacelineError(
            "PL903",
            saw=f"the trace of {name_ranks(without)} has no step.",
            rule="A step ends with an optimizer's step or with a call of the profiler's step().",
            fix="Record more steps: profile from before one optimizer step until after another.",
        )
    spans = ", ".join(
        f"rank {trace.rank} has {trace.steps[0].number} to {trace.steps[-1].number}" for trace in traces
    )
    raise PacelineError(
        "PL903",
        saw=f"no step is in all traces: {spans}.",
        rule="Ranks are compared within the same steps.",
        fix="Give the traces of one run, recorded over the same steps.",
    )


def contradiction_error(ranks: Sequence[int], reason: str) -> PacelineError:
    """Return the error for traces that cannot belong to one run: PL904."""
    return PacelineError(
        "PL904",
        saw=f"the traces of {name_ranks(ranks)} contradict each other: {reason}.",
        rule="All ranks of a run call the same collectives, and none ends before the last rank has entered.",
        fix="Give the traces of one run, recorded over the same steps. If they are, a machine's clock was "
        "set while it recorded: record again.",
    )


def _find_links(traces: Sequence[RankTrace], matched: Sequence[MatchedCollective]) -> Mapping[Key, str]:
    """Return the links that collectives use, by their keys; nothing if all ranks are on one node."""
    hosts = {trace.rank: trace.host for trace in traces}
    if len(set(hosts.values())) < 2:
        return {}
    spans = {
        next(iter(collective.parts.values())).key: len({hosts[rank] for rank in collective.parts}) > 1
        for collective in matched
    }
    return {key: BETWEEN if is_between else WITHIN for key, is_between in spans.items()}


def _measure_steps(
    trace: RankTrace,
    steps: Sequence[TracedStep],
    compute: Coverage,
    waits: Sequence[Waiting],
    links: Mapping[Key, str],
) -> list[RankStep]:
    comm = unite(as_spans((part.issued_ns, part.end_ns) for part in trace.collectives))
    phases = divide_time(trace, as_spans([]))
    cores = CoreTime(trace.scheduling)
    idle = _explain_idle(trace, steps, comm, phases)
    device = trace.device
    copies = None if device is None else Coverage(device.copies)
    under_way, exposed = Coverage(comm), Coverage(subtract(comm, compute.spans))
    backward = phases.get(BACKWARD, Coverage(as_spans([])))
    outside = Coverage(subtract(comm, backward.spans))
    by_links = {}
    for kind in sorted(set(links.values())):
        parts = [part for part in trace.collectives if links.get(part.key) == kind]
        spans = unite(as_spans((part.issued_ns, part.end_ns) for part in parts))
        by_links[kind] = Coverage(spans), Coverage(subtract(spans, compute.spans))
    by_last: dict[int, Coverage] = {}
    for last in {wait.collective.last for wait in waits}:
        spans = unite(as_spans((w.begin_ns, w.end_ns) for w in waits if w.collective.last == last))
        by_last[last] = Coverage(subtract(spans, compute.spans))
    rows = []
    parts = sorted(trace.collectives, key=lambda part: part.issued_ns)
    issues = [part.issued_ns for part in parts]
    for step in steps:
        window = step.begin_ns, step.end_ns
        total = step.end_ns - step.begin_ns
        times = {name: phases[name].measure(*window) for name in PHASES if name in phases}
        rows.append(
            RankStep(
                rank=trace.rank,
                step=step.number,
                total_ns=total,
                phases={**times, HOST: total - sum(times.values())},
                compute_ns=compute.measure(*window),
                comm_ns=under_way.measure(*window),
                exposed_ns=exposed.measure(*window),
                waiting_ns={
                    last: length
                    for last, spans in sorted(by_last.items())
                    if (length := spans.measure(*window))
                },
                backward_comm_ns=under_way.measure(*window) - outside.measure(*window),
                traffic=_count_traffic(
                    step, parts[bisect_left(issues, window[0]) : bisect_left(issues, window[1])], links
                ),
                core_ns=cores.measure_delay(*window),
                by_links={
                    kind: (own.measure(*window), bare.measure(*window))
                    for kind, (own, bare) in by_links.items()
                },
                idle={cause: spans.measure(*window) for cause, spans in idle.items()},
                copies_ns=0 if copies is None else copies.measure(*window),
                num_kernels=0 if device is None else int(np.diff(np.searchsorted(device.kernels, window))[0]),
            )
        )
    return rows


def _explain_idle(
    trace: RankTrace, steps: Sequence[TracedStep], comm: Spans, phases: Mapping[str, Coverage]
) -> dict[str, Coverage]:
    """Return when the GPU had nothing to do, by cause; nothing on CPU.

    A gap belongs to the synchronisation that ends in it, or at most `_AFTER_SYNC_NS` before: the host had
    waited until the device was done, and only then gave it more. Of other gaps, the time in which the host
    loads data is the loader's; in forward, backward and optimizer the host issues kernels more slowly than
    they run.
    """
    if trace.device is None:
        return {}
    whole = unite(as_spans((step.begin_ns, step.end_ns) for step in steps))
    gaps = subtract(whole, unite(trace.compute, trace.device.copies, comm))
    reading = phases[READING].spans if READING in phases else NOTHING
    ends = unite(trace.device.syncs, reading)[:, 1]
    firsts, lasts = (np.searchsorted(ends, gaps[:, 0] - _AFTER_SYNC_NS), np.searchsorted(ends, gaps[:, 1]))
    found, rest = {IDLE_SYNC: gaps[firsts < lasts]}, gaps[firsts >= lasts]
    loading = phases[DATA].spans if DATA in phases else NOTHING
    issuing = unite(*(phases[name].spans for name in (FORWARD, BACKWARD, OPTIMIZER) if name in phases))
    for cause, spans in ((IDLE_DATA, loading), (IDLE_LAUNCH, issuing)):
        left = subtract(rest, spans)
        found[cause], rest = subtract(rest, left), left
    found[IDLE_HOST] = rest
    return {cause: Coverage(spans) for cause, spans in found.items()}


def _count_traffic(
    step: TracedStep, issued: Sequence[TracedCollective], links: Mapping[Key, str]
) -> tuple[Traffic, ...]:
    kinds: dict[tuple[str, str, str, str], list[tuple[int, int, int | None]]] = {}
    for part in issued:
        own = part.issued_ns, min(part.end_ns, step.end_ns), part.num_bytes
        key = part.group, part.operation, part.at, links.get(part.key, "")
        kinds.setdefault(key, []).append(own)
    found = []
    for (group, operation, at, kind), parts in sorted(kinds.items()):
        sizes = [size for _, _, size in parts]
        known = [size for size in sizes if size is not None]
        busy = unite(as_spans((begin, end) for begin, end, _ in parts))
        found.append(
            Traffic(
                group,
                operation,
                len(parts),
                sum(known) if len(known) == len(sizes) else None,
                measure(busy),
                at,
                kind,
            )
        )
    return tuple(found)


def _count_unmatched(
    traces: Sequence[RankTrace], matched: Sequence[MatchedCollective], numbers: set[int]
) -> int:
    if len(traces) < 2:
        return 0
    keys = {next(iter(collective.parts.values())).key for collective in matched}
    count = 0
    for trace in traces:
        steps = [step for step in trace.steps if step.number in numbers]
        begin, end = steps[0].begin_ns, steps[-1].end_ns
        count += sum(
            part.key not in keys
            and part.operation not in TRANSFERS
            and begin <= part.issued_ns
            and part.end_ns <= end
            for part in trace.collectives
        )
    return count
