"""Decides when a node is slow for so long that it may be put out of its job (`--evict-slow`).

At each reading, a node is slow if ranks of other nodes wait for one of its ranks. It counts from the begin of
the window of the first such reading on. Readings in between may find nothing for a few seconds, because a
window is judged strictly.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.watch.reasoning.pace import Slow

# Readings that find nothing for this long end the count.
_GAP_S = 8.0


class SlowTime:
    """The time for which this node has made others wait.

    Args:
        least_s: seconds from which on it counts.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._since_s: float | None = None
        self._last_s = 0.0

    def read(self, found: Sequence[Slow], own: Collection[int], now_s: float) -> list[Slow]:
        """Return the slow ranks for which others wait, once they have waited for long enough; else none.

        Args:
            found: the slow ranks of this node at this reading.
            own: all ranks of this node.
            now_s: the time, of one monotonic clock.
        """
        slow = [each for each in found if not set(each.waiting) <= set(own)]
        if slow:
            if self._since_s is None:
                self._since_s = now_s - slow[0].window_s
            self._last_s = now_s
        elif now_s - self._last_s > _GAP_S:
            self._since_s = None
        if self._since_s is None or now_s - self._since_s < self._least_s:
            return []
        return slow

    def seconds(self, now_s: float) -> float:
        """Return the time for which others have waited, 0 if they do not."""
        return 0.0 if self._since_s is None else now_s - self._since_s
