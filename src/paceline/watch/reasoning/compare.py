"""Compares the collectives that running ranks call, as their beats report them.

Some mismatches stop nothing: gloo adds integers to floats of the same width, and reduces with each rank's own
operation. Here a call is five small numbers, kept for a while by group, number and rank. A difference is only
a suspicion: the ranks are then asked for reports, which must confirm it. Beats have gaps, arrive at different
times, and do not show that a group was recreated under an old name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from paceline.watch.protocol.report import Call, Report, Seen, Verdict
from paceline.watch.protocol.words import sequence_of
from paceline.watch.reasoning.mismatch import (
    EQUAL_DTYPES,
    OPERATIONS,
    REDUCTIONS,
    ROOTED,
    SIZES_NEVER_DIFFER,
    find_mismatch,
    list_dtypes,
    merge_groups,
)

# Numbers per group, and groups; older ones are forgotten.
_MANY_NUMBERS = 2048
_MANY_GROUPS = 256
# Calls that a node publishes every two seconds (3 kB), and calls of each rank after a suspicion (60 kB).
_MANY_PRINTS = 128
_MANY_CALLS = 256
# The pause after a suspicion that the reports did not confirm; it doubles each time.
_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 320.0
_WENT_ON = (
    "Nothing stopped the ranks there: they continued with the results of these calls, which are not the "
    "intended ones."
)


class Print(NamedTuple):
    """The properties of a call that must agree on all ranks, as numbers; 0 if unknown or free to differ.

    Attributes:
        kind: of operation.
        elements: of its tensors.
        dtypes: of its tensors.
        reduce_op: sum, max ...
        root: global rank, counted from 1; or the module whose parameters FSDP gathers or reduces.
    """

    kind: int
    elements: int
    dtypes: int
    reduce_op: int
    root: int

    def fits(self, other: Print) -> bool:
        """Return whether no property differs that is known of both."""
        return all(a == b or not a or not b for a, b in zip(self, other, strict=True))


Prints = Mapping[str, Sequence[Sequence[int]]]
"""For each group, each call's number and the fields of its print."""


def print_call(call: Call) -> Print | None:
    """Return the print of a call; `None` if its operation is unknown or numbered separately."""
    kind = OPERATIONS.get(call.operation)
    if kind is None or sequence_of(call):
        return None
    elements = sum(math.prod(size) for size in call.sizes) if kind in SIZES_NEVER_DIFFER else 0
    dtypes = list_dtypes(call) if kind in EQUAL_DTYPES else None
    return Print(
        _number(kind),
        elements,
        _number(",".join(sorted(dtypes))) if dtypes else 0,
        _number(call.reduce_op) if call.reduce_op and kind in REDUCTIONS else 0,
        _number(call.module)
        if call.module
        else call.peer + 1
        if call.peer is not None and kind in ROOTED
        else 0,
    )


def _number(text: str) -> int:
    """Return a short number for a text, the same in every process."""
    return zlib.crc32(text.encode()) % 65535 + 1


class _Sequence:
    """The latest calls of a group, by number (in the order of the first reports) and rank."""

    def __init__(self) -> None:
        self.calls: dict[int, dict[int, Print]] = {}
        self.latest: dict[int, int] = {}

    def add(self, rank: int, number: int, new: Print) -> bool:
        """Add a rank's call, and return whether it matches those of other ranks."""
        at_once = self.calls.setdefault(number, {})
        at_once[rank] = new
        if len(self.calls) > _MANY_NUMBERS:
            del self.calls[next(iter(self.calls))]
        return all(new.fits(other) for other in at_once.values())


class Comparison:
    """The comparison of one job's calls, from start to restart."""

    def __init__(self) -> None:
        self._sequences: dict[str, _Sequence] = {}
        self._noted: dict[int, Prints] = {}
        self._prints: Prints | None = None
        self._is_suspicious = False
        self._pause_s = _PAUSE_S
        self._rests_until_s = 0.0

    def note_calls(self, rank: int, calls: Iterable[Call]) -> None:
        """Compare calls that a rank of this node has reported."""
        found: dict[str, list[tuple[int, Print]]] = {}
        for call in calls:
            made = print_call(call)
            if made is not None:
                found.setdefault(call.group, []).append((call.number, made))
        for group, numbered in found.items():
            self._note(rank, group, numbered)
        if found:
            self._prints = None

    def note_node(self, node: int, prints: Prints) -> None:
        """Compare calls that another node has published."""
        if prints is self._noted.get(node):  # Nothing new since.
            return
        self._noted[node] = prints
        for group, numbered in prints.items():
            self._note(-1 - node, group, [(number, Print(*fields)) for number, *fields in numbered])

    def _note(self, rank: int, group: str, numbered: Sequence[tuple[int, Print]]) -> None:
        sequence = self._sequences.setdefault(group, _Sequence())
        if len(self._sequences) > _MANY_GROUPS:
            del self._sequences[next(iter(self._sequences))]
        numbers = [number for number, _ in numbered]
        # A node publishes the same numbers repeatedly; a rank whose numbers restart has recreated the group.
        if rank >= 0 and min(numbers) <= sequence.latest.get(rank, 0):
            sequence = self._sequences[group] = _Sequence()
        sequence.latest[rank] = max(numbers)
        for number, made in numbered:
            if not sequence.add(rank, number, made):
                self._is_suspicious = True

    def read_prints(self) -> Prints:
        """Return the latest calls of this node's ranks for the other nodes, evenly by group."""
        if self._prints is None:
            self._prints = self._collect_prints()
        return self._prints

    def _collect_prints(self) -> Prints:
        each = max(1, _MANY_PRINTS // max(1, len(self._sequences)))
        found: dict[str, list[list[int]]] = {}
        for group, sequence in list(self._sequences.items())[-_MANY_PRINTS:]:
            for number in sorted(sequence.calls, reverse=True):
                own = next((made for rank, made in sequence.calls[number].items() if rank >= 0), None)
                if own is not None:
                    found.setdefault(group, []).append([number, *own])
                if len(found.get(group, ())) >= each:
                    break
        return found

    def is_suspicious(self, now_s: float) -> bool:
        """Return whether calls differed and it is time to ask the ranks."""
        return self._is_suspicious and self.is_awake(now_s)

    def is_awake(self, now_s: float) -> bool:
        """Return whether the pause after the latest unconfirmed suspicion is over."""
        return now_s >= self._rests_until_s

    def drop_suspicion(self, now_s: float) -> None:
        """Forget a suspicion that the reports did not confirm, and pause for a while."""
        self._sequences, self._prints, self._is_suspicious = {}, None, False
        self._rests_until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


# ---- what the reports have to show


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


def strip(seen: Seen) -> Seen:
    """Return what other nodes need to compare a running job's calls: the latest ones."""
    reports = {rank: replace(r, calls=_latest(r), stacks=()) for rank, r in seen.reports.items()}
    return Seen(seen.world_size, {}, reports)


def _latest(report: Report) -> tuple[Call, ...]:
    return tuple(_of_living_groups(report)[-_MANY_CALLS:])
