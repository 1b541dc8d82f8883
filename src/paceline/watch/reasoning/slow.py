"""Describes a slow rank: which ranks wait for it, and where it spends the time that the others do not.

A forward pass that all ranks share makes no rank wait. So the ranks' places are compared as a tree of the
user's functions, from the script inwards. Each function has a share: the fraction of time that the slow rank
spends there beyond that of the others. The innermost function that still holds most of the total excess is
named, with its line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.phrases import name_ranks
from paceline.watch.protocol.report import Frame, PlaceTime, SharedPlace, Verdict
from paceline.watch.protocol.words import own_frames, pick
from paceline.watch.reasoning.activity import find_activity, find_distributed
from paceline.watch.reasoning.pace import PaceBook, Slow
from paceline.watch.reasoning.source import Source
from paceline.watch.reasoning.verdict import build_verdict

# The innermost function with this share of the slow rank's excess is named.
_ENOUGH = 0.7
# If the slow rank's work is this similar to the others', it is slower in all of it.
_ALIKE = 1.5
_NEARLY_ALL = 0.8
# If the others spend this share of the time there, a line is more specific than its function.
_SOME = 0.1
# Seconds between two checks, and the maximum of reports.
_EVERY_S = 2.0
_MOST = 5

_LOADER = re.compile(r"/torch/utils/data/|data_?loader")
_FIX = "Distribute this work evenly, or do it where no rank waits: in loader workers, or in a thread."
_FIX_LOADER = (
    "Use more workers for its loader (num_workers, prefetch_factor), faster storage, or samples that cost as "
    "much as those of the other ranks."
)
_WRITES = re.compile(r"/paceline/(checkpoint/|train/(metrics|state/))")
_FIX_DISK = "It writes the run's metrics or checkpoint: look whether the disk of the run's folder answers."
_FIX_MACHINE = (
    "It is slower everywhere: check its core or device for other processes, limits, clock and "
    "temperature, and whether its samples are larger."
)

_Function = tuple[str, str]
_Path = tuple[_Function, ...]


@dataclass(frozen=True)
class SlowSpot:
    """The place where a slow rank spends its time.

    Attributes:
        share: of the time that it is there.
        others: the share of the time that the others are there.
        words: what it does there: `is asleep in time.sleep`; may be empty.
        frames: the user's own, innermost first; empty if none are known.
        is_line: whether the place is that line alone, or all of its function.
        is_everywhere: whether it is slower at the same work as the others, rather than at work of its
            own.
        is_loader: whether that is in the data loader.
    """

    share: float
    others: float
    words: str
    frames: tuple[Frame, ...]
    is_line: bool
    is_everywhere: bool
    is_loader: bool


class _Work:
    """The mean share of time that ranks worked in each of the user's functions, and at each line there.

    Args:
        ranks: the places of each rank.
    """

    def __init__(self, ranks: Sequence[Sequence[PlaceTime]]) -> None:
        self._functions: dict[_Path, float] = defaultdict(float)
        self._lines: dict[tuple[_Path, int], float] = defaultdict(float)
        for places in ranks:
            total_s = sum(place.seconds for place in places) * len(ranks)
            for place in places:
                if not place.is_waiting:
                    self._add(own_frames(place.frames)[::-1], place.seconds / total_s)

    def _add(self, frames: Sequence[Frame], share: float) -> None:
        path = _find_path(frames)
        for depth in range(len(path) + 1):
            self._functions[path[:depth]] += share
        for depth, frame in enumerate(frames, 1):
            self._lines[path[:depth], frame.line] += share

    def share(self, path: _Path, line: int | None = None) -> float:
        """Return the share of a function, or of a line in it, including all calls from there."""
        where = self._functions.get(path) if line is None else self._lines.get((path, line))
        return where or 0.0

    def inner(self, path: _Path) -> list[_Path]:
        """Return the functions that one calls."""
        depth = len(path)
        return [each for each in self._functions if len(each) == depth + 1 and each[:depth] == path]

    def lines(self, path: _Path) -> list[int]:
        """Return the lines of a function where ranks were."""
        return [line for each, line in self._lines if each == path]


def _find_path(frames: Sequence[Frame]) -> _Path:
    """Return the functions of a stack, outermost first."""
    return tuple((frame.file, frame.function) for frame in frames)


def find_spot(own: Sequence[PlaceTime], others: Sequence[Sequence[PlaceTime]], source: Source) -> SlowSpot:
    """Return the place where a rank spends the time that the others do not.

    Args:
        others: the places of each other rank in the same time.
        source: supplies the text of lines.
    """
    mine, theirs = _Work((own,)), _Work(others)

    def excess(path: _Path, line: int | None = None) -> float:
        return mine.share(path, line) - theirs.share(path, line)

    # Descend while one inner function still holds most of the whole excess.
    path: _Path = ()
    while True:
        best = max(mine.inner(path), key=excess, default=None)
        if best is None or excess(best) < _ENOUGH * excess(()):
            break
        path = best
    line = max(mine.lines(path), key=lambda each: excess(path, each), default=None)
    is_line = excess(path, line) >= _NEARLY_ALL * excess(path) or theirs.share(path) >= _SOME
    share, of_others = (work.share(path, line if is_line else None) for work in (mine, theirs))
    # Compare shares of each side's work, not of its time.
    is_alike = share * theirs.share(()) < _ALIKE * of_others * mine.share(())
    words, is_loader = _describe(own, path, source)
    return SlowSpot(
        share,
        of_others,
        words,
        _show(own, path, line),
        is_line,
        bool(path) and is_alike and (not is_line or share < _NEARLY_ALL * mine.share(())),
        is_loader,
    )


def _is_at(place: PlaceTime, path: _Path) -> bool:
    found = _find_path(own_frames(place.frames)[::-1])
    return not place.is_waiting and found[: len(path)] == path


def _describe(own: Sequence[PlaceTime], path: _Path, source: Source) -> tuple[str, bool]:
    """Return what the rank mostly does in a function, and whether it is in a loader then."""
    seconds: dict[str, float] = defaultdict(float)
    loader_s = 0.0
    for place in own:
        if not _is_at(place, path):
            continue
        activity = find_activity(place.frames, source)
        is_inner = len(own_frames(place.frames)) == len(path)
        # The lines of inner functions describe what is done there.
        seconds[activity if activity is not None and is_inner else ""] += place.seconds
        if any(_LOADER.search(frame.file) for frame in place.frames if not own_frames((frame,))):
            loader_s += place.seconds
    words = max(seconds, key=lambda each: seconds[each], default="")
    is_loader = loader_s > sum(seconds.values()) / 2
    if is_loader and "loader" not in words:
        rest = (
            f", {words.removeprefix('is ')}" if words.startswith("is ") else f" and {words}" if words else ""
        )
        words = f"is in the data loader{rest}"
    return words, is_loader


def _show(own: Sequence[PlaceTime], path: _Path, line: int | None) -> tuple[Frame, ...]:
    """Return the user's frames down to a line of a function, innermost first, by the path that took
    longest."""
    ways: dict[tuple[Frame, ...], float] = defaultdict(float)
    for place in own:
        frames = own_frames(place.frames)
        way = frames[len(frames) - len(path) :]
        if path and _is_at(place, path) and way[0].line == line:
            ways[way] += place.seconds
    return max(ways, key=lambda way: ways[way], default=())


# ---- words


def build_message(slow: Sequence[Slow], spot: SlowSpot, waits: Sequence[PlaceTime]) -> Verdict:
    """Return the message as a verdict; it ends nothing.

    Args:
        slow: ranks that are slow at the same place; the shares are those of the first.
        spot: the place of the first one.
        waits: the places of the ranks that wait for it, as far as they are on this node.
    """
    first, ranks = slow[0], tuple(each.rank for each in slow)
    who = name_ranks(first.waiting)
    headline = (
        f"{name_ranks(ranks)} {pick(ranks, 'makes', 'make')} {who} wait: "
        f"{pick(first.waiting, 'it has', 'they have')} waited in collectives for "
        f"{first.waiting_share:.0%} of the last {first.window_s:.0f} s, "
        f"{name_ranks((first.rank,))} for {first.share:.0%}"
    )
    theirs = f" ({who}: {spot.others:.0%})" if waits else ""
    here = "here" if spot.is_line or not spot.frames else f"in {spot.frames[0].function}, mostly here,"
    what = f"{spot.words}," if spot.words else f"is {here}"
    what += f" {spot.share:.0%} of the time{theirs}"
    fix = _FIX_MACHINE if spot.is_everywhere else _FIX_LOADER if spot.is_loader else _FIX
    if spot.frames and _WRITES.search(spot.frames[0].file):
        fix = _FIX_DISK
    places = (SharedPlace(ranks, what, spot.frames), *_place_waits(first, waits))
    return build_verdict("PL820", headline, places, fix=fix)


def _place_waits(slow: Slow, waits: Sequence[PlaceTime]) -> list[SharedPlace]:
    """Return where the others wait most."""
    seconds: dict[tuple[Frame, ...], float] = defaultdict(float)
    frames: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
    for place in waits:
        if place.is_waiting:
            own = own_frames(place.frames)
            seconds[own] += place.seconds
            frames.setdefault(own, place.frames)
    if not seconds:
        return []
    stack = frames[max(seconds, key=lambda own: seconds[own])]
    is_backward = any(frame.function == "_engine_run_backward" for frame in stack)
    operation = find_distributed(stack) or ("backward" if is_backward else "")
    words = f"waits in {operation}" if operation else "waits for others"
    return [SharedPlace(slow.waiting, f"{words}, mostly", own_frames(stack))]


# ---- when


class SlowRanks:
    """The reports of slow ranks, one per rank; times are of one monotonic clock.

    Attributes:
        book: receives the beats.

    Args:
        read_source: returns the lines of a file.
    """

    def __init__(self, read_source: Callable[[str], Sequence[str]]) -> None:
        self.book = PaceBook()
        self._source = Source(read_source)
        self._reported: set[int] = set()
        self._polled_s = 0.0
        self._num_reported = 0

    def read(self, now_s: float, late_s: float = 0.0) -> Verdict | None:
        """Return the message that is due, or `None`.

        Args:
            late_s: the maximum delay of what other nodes publish.
        """
        if now_s - self._polled_s < _EVERY_S or self._num_reported >= _MOST:
            return None
        self._polled_s = now_s
        ends_s = now_s - late_s
        new = [slow for slow in self.book.find_slow(ends_s) if slow.rank not in self._reported]
        found = [(slow, self._find_spot(slow, ends_s)) for slow in new]
        if not found:
            return None
        first, spot = found[0]
        same = [slow for slow, other in found if other.frames[:1] == spot.frames[:1]]
        self._reported |= {slow.rank for slow in same}
        self._num_reported += 1
        waits = [self.book.places(rank, first.window_s, ends_s) for rank in first.waiting]
        return build_message(same, spot, [place for places in waits for place in places])

    def _find_spot(self, slow: Slow, ends_s: float) -> SlowSpot:
        own = self.book.places(slow.rank, slow.window_s, ends_s)
        others = [self.book.places(rank, slow.window_s, ends_s) for rank in slow.waiting]
        return find_spot(own, [places for places in others if places], self._source)
