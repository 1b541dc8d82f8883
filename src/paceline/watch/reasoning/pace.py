"""Finds slow ranks: compares each rank's share of waiting with its peers', over the last seconds.

In a job whose ranks run in step, all wait for the slowest, and only that one does not wait. So no clocks need
to be synchronised: each rank's share of samples in which it waits suffices. A rank is slow if most of the
ranks that it shares groups with wait more than it does, by at least 20% of the time and more than twice as
long. This must hold in each fifth of a window, not just at times. Windows are from 10 to 160 s long. A short
one requires a larger difference and many collectives, because a few samples or a few steps of unequal length
may differ by chance. Ranks of other nodes are judged there, and only compared with here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import mean

from paceline.watch.protocol.report import Beat, Frame, PlaceTime

LEAST_DIFFERENCE = 0.20
_WINDOWS_S = (10.0, 20.0, 40.0, 80.0, 160.0)
_FEWEST_SAMPLES = 32
# Collectives of one group in a window; with fewer, the longest window decides.
_FEWEST_COLLECTIVES = 20
# The limit for chance: a share of 50 samples deviates by 0.07, and a difference of two by 0.1; five times
# that does not occur by chance in weeks. It decreases with the root of the number of samples.
_CHANCE = 0.5
_SAMPLES_OF_CHANCE = 50
_NUM_BLOCKS = 5
# The share of a window, and of one of its fifths, that samples must cover.
_LEAST_COVERED = 0.8
_LEAST_COVERED_BLOCK = 0.25
# The time that a message to other nodes covers, because they may miss one.
_SENT_S = 12.0
_MANY_FRAMES = 10_000


@dataclass(frozen=True)
class BeatInterval:
    """A rank's time between two of its beats.

    Attributes:
        number: of the beat.
        ends_s: when it ended, by this launcher's clock; for other launchers, since it published this.
        seconds: the time that its samples stand for.
        waited_s: the part of it spent waiting.
        samples: their number.
        groups: in whose collectives the rank took part meanwhile, or waits.
        collectives: number of collectives that it issued in the busiest of these groups.
        places: where it was; not for other launchers.
    """

    number: int
    ends_s: float
    seconds: float
    waited_s: float
    samples: int
    groups: tuple[str, ...]
    collectives: int
    places: tuple[PlaceTime, ...] = ()


@dataclass(frozen=True)
class RankPace:
    """A rank's waiting, as its launcher publishes it.

    Attributes:
        rank: global.
        groups: all in which it has ever called.
        stretches: the latest.
    """

    rank: int
    groups: tuple[str, ...]
    stretches: tuple[BeatInterval, ...]


@dataclass(frozen=True)
class Slow:
    """A rank that others wait for.

    Attributes:
        rank: global.
        share: of the time that it waits.
        waiting: ranks that wait for it.
        waiting_share: the share of the time that these wait.
        peers: all ranks that it was compared with.
        window_s: length of the window.
    """

    rank: int
    share: float
    waiting: tuple[int, ...]
    waiting_share: float
    peers: tuple[int, ...]
    window_s: float


@dataclass
class _History:
    """The recent stretches of one rank."""

    groups: set[str] = field(default_factory=set)
    spans: deque[BeatInterval] = field(default_factory=deque)
    issued: Mapping[str, int] = field(default_factory=dict)
    number: int = 0
    is_own: bool = True

    def add(self, span: BeatInterval) -> None:
        self.number = span.number
        self.groups.update(span.groups)
        self.spans.append(span)
        while self.spans[0].ends_s < span.ends_s - _WINDOWS_S[-1] - _SENT_S:
            self.spans.popleft()

    def between(self, begins_s: float, ends_s: float) -> list[BeatInterval]:
        return [span for span in self.spans if begins_s < span.ends_s <= ends_s]


@dataclass(frozen=True)
class _Share:
    """A rank's share of waiting in a window of so many samples, and in each of its fifths.

    `None` for a fifth that samples cover too little.
    """

    whole: float
    blocks: tuple[float | None, ...]
    samples: int


class PaceBook:
    """The recent history of all ranks; times are of one monotonic clock."""

    def __init__(self) -> None:
        self._histories: dict[int, _History] = {}
        self._frames: dict[Frame, Frame] = {}

    def note_beat(self, beat: Beat, now_s: float) -> None:
        """Add a beat of a rank of this node."""
        history = self._histories.setdefault(beat.rank, _History())
        before, history.issued = history.issued, beat.issued
        history.groups.update(beat.issued)
        if beat.pace is None:
            return
        places = tuple(self._intern(place) for place in beat.pace.places)
        fresh = {group: number - before.get(group, 0) for group, number in beat.issued.items()}
        active = [g for g, n in beat.issued.items() if fresh[g] or n != beat.completed.get(g)]
        stretch = BeatInterval(
            history.number + 1,
            now_s,
            sum(place.seconds for place in places),
            sum(place.seconds for place in places if place.is_waiting),
            beat.pace.samples,
            tuple(active),
            max(fresh.values(), default=0),
            places,
        )
        history.add(stretch)

    def note_others(self, paces: Iterable[RankPace], now_s: float, age_s: float) -> None:
        """Add what another launcher published about its ranks, `age_s` seconds ago."""
        for pace in paces:
            history = self._histories.setdefault(pace.rank, _History(is_own=False))
            history.groups.update(pace.groups)
            for stretch in pace.stretches:
                if stretch.number > history.number:
                    history.add(replace(stretch, ends_s=now_s - age_s + stretch.ends_s))

    def list_paces(self, now_s: float) -> tuple[RankPace, ...]:
        """Return what other launchers need."""
        paces = []
        for rank, history in self._histories.items():
            if history.is_own and (spans := history.between(now_s - _SENT_S, now_s)):
                stretches = [
                    replace(
                        span,
                        ends_s=round(span.ends_s - now_s, 2),
                        seconds=round(span.seconds, 3),
                        waited_s=round(span.waited_s, 3),
                        places=(),
                    )
                    for span in spans
                ]
                paces.append(RankPace(rank, tuple(sorted(history.groups)), tuple(stretches)))
        return tuple(paces)

    def find_slow(self, ends_s: float) -> list[Slow]:
        """Return the slow ranks of this node in the shortest window that shows any."""
        for window_s in _WINDOWS_S:
            shares = self._read_shares(window_s, ends_s)
            own = [rank for rank in sorted(shares) if self._histories[rank].is_own]
            found = [slow for rank in own if (slow := self._judge(rank, shares, window_s, ends_s))]
            if found:
                return found
        return []

    def places(self, rank: int, window_s: float, ends_s: float) -> list[PlaceTime]:
        """Return the places of a rank of this node in a window."""
        history = self._histories.get(rank, _History())
        return [place for span in history.between(ends_s - window_s, ends_s) for place in span.places]

    def _intern(self, place: PlaceTime) -> PlaceTime:
        """Return an equal place that reuses known frames, because they recur."""
        if len(self._frames) > _MANY_FRAMES:
            self._frames.clear()
        return replace(place, frames=tuple(self._frames.setdefault(f, f) for f in place.frames))

    # ---- judging

    def _read_shares(self, window_s: float, ends_s: float) -> dict[int, _Share]:
        begins_s = ends_s - window_s
        found = {}
        for rank, history in self._histories.items():
            spans = history.between(begins_s, ends_s)
            whole = _divide(spans, _LEAST_COVERED * window_s)
            samples = sum(span.samples for span in spans)
            if whole is None or samples < _FEWEST_SAMPLES:
                continue
            block_s = window_s / _NUM_BLOCKS
            blocks: list[list[BeatInterval]] = [[] for _ in range(_NUM_BLOCKS)]
            for span in spans:
                blocks[min(_NUM_BLOCKS - 1, int((span.ends_s - begins_s) / block_s))].append(span)
            least_s = _LEAST_COVERED_BLOCK * block_s
            found[rank] = _Share(whole, tuple(_divide(block, least_s) for block in blocks), samples)
        return found

    def _judge(self, rank: int, shares: Mapping[int, _Share], window_s: float, ends_s: float) -> Slow | None:
        own = shares[rank]
        peers = [peer for peer in shares if peer != rank and self._may_wait(peer, rank, window_s, ends_s)]
        waiting = [
            peer
            for peer in peers
            if shares[peer].whole - own.whole >= LEAST_DIFFERENCE and own.whole < shares[peer].whole / 2
        ]
        if 2 * len(waiting) <= len(peers):
            return None
        # From here on: conditions that keep chance and short disturbances from counting as slowness.
        theirs = _join([shares[peer] for peer in waiting])
        samples = min(own.samples, theirs.samples)
        if theirs.whole - own.whole < _CHANCE * (_SAMPLES_OF_CHANCE / samples) ** 0.5:
            return None
        if self._count(rank, window_s, ends_s) < _FEWEST_COLLECTIVES and window_s < _WINDOWS_S[-1]:
            return None
        # A single long delay fills one fifth; a slow rank is slow in each, by at least half the difference.
        for one, other in zip(theirs.blocks, own.blocks, strict=True):
            if one is None or other is None or one - other < LEAST_DIFFERENCE / 2:
                return None
        if not self._was_slow(rank, waiting, ends_s):
            return None
        return Slow(rank, own.whole, tuple(sorted(waiting)), theirs.whole, tuple(sorted(peers)), window_s)

    def _was_slow(self, rank: int, waiting: Iterable[int], ends_s: float) -> bool:
        """Return whether the others' waiting exceeds a rank's enough over all that is known of the longest
        window."""
        begins_s = ends_s - _WINDOWS_S[-1]
        known = [_divide(self._histories[each].between(begins_s, ends_s), 0.0) for each in (rank, *waiting)]
        own, *others = [share or 0.0 for share in known]
        return mean(others) - own >= LEAST_DIFFERENCE

    def _count(self, rank: int, window_s: float, ends_s: float) -> int:
        """Return the number of collectives that a rank has issued; those before its first beat do not
        count."""
        spans = self._histories[rank].between(ends_s - window_s, ends_s)
        return sum(span.collectives for span in spans)

    def _may_wait(self, one: int, other: int, window_s: float, ends_s: float) -> bool:
        """Return whether a rank is active in a group to which the other one belongs."""
        spans = self._histories[one].between(ends_s - window_s, ends_s)
        return any(not self._histories[other].groups.isdisjoint(span.groups) for span in spans)


def _divide(spans: Iterable[BeatInterval], least_s: float) -> float | None:
    seconds = waited_s = 0.0
    for span in spans:
        seconds += span.seconds
        waited_s += span.waited_s
    return waited_s / seconds if seconds >= least_s else None


def _join(shares: list[_Share]) -> _Share:
    blocks = [[share.blocks[n] for share in shares] for n in range(_NUM_BLOCKS)]
    known = [[share for share in block if share is not None] for block in blocks]
    return _Share(
        sum(share.whole for share in shares) / len(shares),
        tuple(sum(block) / len(block) if block else None for block in known),
        min(share.samples for share in shares),
    )
