"""Matches collectives over ranks, and divides each rank's part into waiting and transfer.

A rank waits in a collective until the last rank of the group has arrived. The rest of its part is transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.profiling.intervals import Coverage
from paceline.profiling.rank_trace import MEETINGS, RankTrace, TracedCollective

Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class MatchedCollective:
    """A collective with the parts of at least two ranks.

    Attributes:
        parts: by rank.
        last: the rank that arrived last.
    """

    parts: Mapping[int, TracedCollective]
    last: int

    @property
    def arrived_ns(self) -> int:
        """The instant from which all ranks were there."""
        return self.parts[self.last].issued_ns


@dataclass(frozen=True, slots=True)
class Waiting:
    """The time for which a rank waited in a collective, without what it waited in earlier ones meanwhile.

    Attributes:
        rank: who waited.
        collective: the rank waited for its `last`.
        begin_ns, end_ns: the span; the rank may have computed in it.
        exposed_ns: the part without computation.
        is_certain: whether `exposed_ns` exceeds the error of both ranks' clocks.
    """

    rank: int
    collective: MatchedCollective
    begin_ns: int
    end_ns: int
    exposed_ns: int
    is_certain: bool


@dataclass(frozen=True)
class Meetings:
    """The collectives in which ranks met, and how long each rank waited there.

    Attributes:
        matched: collectives that at least two ranks have, in order of arrival.
        num_unlike: pairs of group and number under which ranks have different operations.
        compute: by rank, when it computed.
        waits: by rank, in order of issue.
    """

    matched: Sequence[MatchedCollective]
    num_unlike: int
    compute: Mapping[int, Coverage]
    waits: Mapping[int, Sequence[Waiting]]


def find_meetings(traces: Sequence[RankTrace]) -> Meetings:
    """Return where the ranks met; the analysis and the advice both need it."""
    matched, num_unlike = match_collectives(traces)
    compute = {trace.rank: Coverage(trace.compute) for trace in traces}
    waits = find_waits(matched, compute, {trace.rank: trace.clock_error_ns for trace in traces})
    return Meetings(matched, num_unlike, compute, waits)


def match_collectives(traces: Sequence[RankTrace]) -> tuple[list[MatchedCollective], int]:
    """Return the collectives that at least two ranks have, in order of arrival, and of contradictions.

    The second is the number of pairs of group and number under which ranks have different operations.
    """
    found: dict[Key, dict[int, TracedCollective]] = {}
    for trace in traces:
        for part in trace.collectives:
            found.setdefault(part.key, {})[trace.rank] = part
    matched, num_unlike = [], 0
    for (_, sequence, _), parts in found.items():
        if len(parts) < 2:
            continue
        if not sequence and len(Counter(part.operation for part in parts.values())) > 1:
            num_unlike += 1
            continue
        # Of ranks that arrive at the same instant, the lowest is the last one.
        last = max(sorted(parts), key=lambda rank: parts[rank].issued_ns)
        matched.append(MatchedCollective(parts, last))
    matched.sort(key=lambda collective: collective.arrived_ns)
    return matched, num_unlike


def find_waits(
    matched: Sequence[MatchedCollective], compute: Mapping[int, Coverage], errors_ns: Mapping[int, int]
) -> dict[int, list[Waiting]]:
    """Return, by rank, the waits in its collectives in order of issue.

    A rank that has issued several collectives waits in the one that it issued first.

    Args:
        compute: by rank, when it computed.
        errors_ns: by rank, the error of its clock.
    """
    waits: dict[int, list[Waiting]] = {}
    for rank, computed in compute.items():
        own = [collective for collective in matched if rank in collective.parts]
        own.sort(key=lambda collective: collective.parts[rank].issued_ns)
        waits[rank], until = [], 0
        for collective in own:
            part = collective.parts[rank]
            begin, end = max(until, part.issued_ns), min(collective.arrived_ns, part.end_ns)
            until = max(until, end)
            if end > begin:
                exposed = end - begin - computed.measure(begin, end)
                error = errors_ns[rank] + errors_ns[collective.last]
                waits[rank].append(Waiting(rank, collective, begin, end, exposed, exposed > error))
    return waits


def bound_offset(first: RankTrace, other: RankTrace) -> tuple[int, int] | None:
    """Return the least and the largest nanoseconds by which the other's clock can be ahead of the first's.

    No rank leaves a collective before the last one has entered it. The first bound exceeds the second if the
    traces contradict this. `None` if the ranks met in no collective.
    """
    theirs = {part.key: part for part in other.collectives if part.operation in MEETINGS}
    pairs = [(part, theirs[part.key]) for part in first.collectives if part.key in theirs]
    pairs = [(mine, its) for mine, its in pairs if mine.operation == its.operation]
    if not pairs:
        return None
    least = max(its.issued_ns - mine.end_ns for mine, its in pairs)
    return least, min(its.end_ns - mine.issued_ns for mine, its in pairs)
