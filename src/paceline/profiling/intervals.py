"""Arithmetic with sets of instants: unions, differences and lengths of spans of time.

`Spans` are rows of (begin, end) in whole nanoseconds. Disjoint spans are sorted, do not touch each other and
are not empty; `unite` makes them. Sums of durations would count twice what happens at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Spans = NDArray[np.int64]

NOTHING: Spans = np.empty((0, 2), dtype=np.int64)


def as_spans(pairs: Iterable[tuple[int, int]]) -> Spans:
    """Return rows of (begin, end) as an array of shape (n, 2)."""
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2)


def unite(*parts: Spans) -> Spans:
    """Return the instants that any span covers, as disjoint spans."""
    spans = np.concatenate(parts) if parts else NOTHING
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return NOTHING
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    is_first = np.concatenate(([True], spans[1:, 0] > reach[:-1]))
    firsts = np.flatnonzero(is_first)
    lasts = np.concatenate((firsts[1:] - 1, [len(spans) - 1]))
    return np.stack((spans[firsts, 0], reach[lasts]), axis=1)


def subtract(left: Spans, right: Spans) -> Spans:
    """Return the instants that `left` covers and `right` does not; all three are disjoint spans."""
    if not len(left) or not len(right):
        return left
    edges = np.unique(np.concatenate((left.ravel(), right.ravel())))
    begins, ends = edges[:-1], edges[1:]
    chosen = _is_covered(left, begins) & ~_is_covered(right, begins)
    return unite(np.stack((begins[chosen], ends[chosen]), axis=1))


def _is_covered(spans: Spans, instants: NDArray[np.int64]) -> NDArray[np.bool_]:
    place = np.searchsorted(spans[:, 0], instants, side="right") - 1
    covered: NDArray[np.bool_] = (place >= 0) & (instants < spans[np.maximum(place, 0), 1])
    return covered


def measure(spans: Spans) -> int:
    """Return the length of disjoint spans."""
    return int((spans[:, 1] - spans[:, 0]).sum())


class Coverage:
    """Disjoint spans, for many questions of how much they cover between two instants.

    Args:
        spans: disjoint.
    """

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self._before = np.concatenate(([0], np.cumsum(spans[:, 1] - spans[:, 0])))

    def measure(self, begin_ns: int, end_ns: int) -> int:
        """Return the nanoseconds covered between two instants; 0 if the second is not later."""
        return max(0, self._until(end_ns) - self._until(begin_ns)) if end_ns > begin_ns else 0

    def covers(self, instants_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which instants the spans cover."""
        if not len(self.spans):
            return np.zeros(len(instants_ns), dtype=bool)
        return _is_covered(self.spans, instants_ns)

    def _until(self, instant_ns: int) -> int:
        place = int(np.searchsorted(self.spans[:, 0], instant_ns, side="right"))
        if not place:
            return 0
        begin, end = self.spans[place - 1]
        return int(self._before[place - 1] + min(instant_ns, end) - begin)
