"""Compares the collectives that running ranks report.

Reports are made at slightly different times, and do not show that a group was recreated under an old name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from paceline.watch.protocol.report import Call, Report, Verdict
from paceline.watch.protocol.words import sequence_of
from paceline.watch.reasoning.mismatch import find_mismatch, merge_groups

# Calls that a node publishes (20 kB).
_MANY_CALLS = 128
_WENT_ON = (
    "Nothing stopped the ranks there: they continued with the results of these calls, which are not the "
    "intended ones."
)


def confirm(
    reports: Mapping[int, Report],
    read_source: Callable[[str], Sequence[str]] | None = None,
    *,
    has_ended: bool = False,
) -> Verdict | None:
    """Return the mismatch in the reports of running ranks, or `None` if it is not certain.

    Args:
        reports: by rank.
        read_source: as in `explain_hang`.
        has_ended: whether all ranks have ended. Then each has made its last group of a name, and reports
          that group's calls only.
    """
    calls = {rank: _of_living_groups(report) for rank, report in reports.items()}
    apart = set() if has_ended else _find_apart(calls)
    calls = {rank: [call for call in issued if call.group not in apart] for rank, issued in calls.items()}
    verdict = find_mismatch(calls, merge_groups(reports), read_source, is_running=True)
    return None if verdict is None else replace(verdict, more=(*verdict.more, _WENT_ON))


def _of_living_groups(report: Report) -> list[Call]:
    return [call for call in report.calls if call.group in report.groups]


def _find_apart(calls: Mapping[int, Sequence[Call]]) -> set[str]:
    """Return groups in which all calls of one rank came before all calls of another.

    These may belong to two groups with one name: the first was destroyed, and the second made meanwhile. No
    rank calls anything in a group before all its members have made it.
    """
    began: dict[str, dict[int, list[float]]] = {}
    for rank, issued in calls.items():
        for call in issued:
            began.setdefault(call.group, {}).setdefault(rank, []).append(call.began_s)
    return {
        name
        for name, by_rank in began.items()
        if max(min(times) for times in by_rank.values()) > min(max(times) for times in by_rank.values())
    }


def choose_calls(reports: Mapping[int, Report]) -> dict[int, Report]:
    """Return what other nodes need to compare a running job's calls: a few of one rank, for each group."""
    first: dict[str, int] = {}
    for rank, report in sorted(reports.items()):
        for name in report.groups:
            first.setdefault(name, rank)
    most = max(1, _MANY_CALLS // max(1, len(first)))
    chosen: dict[int, list[Call]] = {}
    for name, rank in first.items():
        issued = [c for c in reports[rank].calls if c.group == name and not sequence_of(c)]
        chosen.setdefault(rank, []).extend(_sample(issued, most))
    return {rank: replace(reports[rank], calls=tuple(calls), stacks=()) for rank, calls in chosen.items()}


def _sample(calls: Sequence[Call], most: int) -> Sequence[Call]:
    """Choose calls by a hash of their number: a smaller choice is a part of a larger one on any node, and has
    no period that could be that of the steps."""
    below = 1 << 32
    while len(calls) > most:
        below //= 2
        calls = [call for call in calls if zlib.crc32(str(call.number).encode()) < below]
    return calls
