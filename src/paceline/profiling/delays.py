"""Measures for how long a rank ran and waited for a core, within spans of its time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.profiling.intervals import Spans


class CoreTime:
    """The time for which a thread ran, and for which it could run and had no core, as functions of time.

    Between two instants at which the kernel's counters were read, both are taken as even.

    Args:
        scheduling: rows of an instant, and for how long the thread had run and waited, by instant. With fewer
            than two, both count as 0.
    """

    def __init__(self, scheduling: NDArray[np.int64]) -> None:
        self._rows = None
        if len(scheduling) > 1:
            # Floats since the first instant: since 1970, they would have steps of 256 ns.
            self._origin = scheduling[0]
            self._rows = (scheduling - self._origin).astype(np.float64)

    def measure_run(self, begin_ns: int, end_ns: int) -> int:
        """Return for how long the thread ran between two instants."""
        return self._measure(np.array([[begin_ns, end_ns]]), begin_ns, end_ns, 1)

    def measure_delay(self, begin_ns: int, end_ns: int, spans: Spans | None = None) -> int:
        """Return for how long it waited for a core between two instants, within disjoint spans if given."""
        within = np.array([[begin_ns, end_ns]]) if spans is None else spans
        return self._measure(within, begin_ns, end_ns, 2)

    def _measure(self, spans: Spans, begin_ns: int, end_ns: int, column: int) -> int:
        if self._rows is None or end_ns <= begin_ns:
            return 0
        first = int(np.searchsorted(spans[:, 1], begin_ns, side="right"))
        last = int(np.searchsorted(spans[:, 0], end_ns, side="left"))
        cut = np.clip(spans[first:last], begin_ns, end_ns)
        until = np.interp(cut - self._origin[0], self._rows[:, 0], self._rows[:, column])
        return int(np.clip(until[:, 1] - until[:, 0], 0, cut[:, 1] - cut[:, 0]).sum())
