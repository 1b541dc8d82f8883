"""From calls that seem not to fit together, in a job that goes on, to a verdict: when all ranks are asked.

On one node they are asked at once. On several, launchers tell each other an instant a few seconds ahead at
which each asks its ranks, because what is recorded goes back a few seconds only; then they exchange the
reports. Each comes to the same verdict, or to none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from paceline.watch.launcher.nodes import EVERY_S, Others
from paceline.watch.protocol.report import Call, Seen, Verdict
from paceline.watch.reasoning.compare import Comparison, Prints, confirm, strip

# How long it takes until all nodes have read what one has written, and back.
_HEARD_S = 2.5 * EVERY_S
_ANSWERED_S = 4 * EVERY_S
# Nodes choose the next multiple of this, so that they choose alike without having heard each other.
_ROUND_S = 8.0


class NodeSuspicion(NamedTuple):
    """What the other nodes have to know.

    Attributes:
        prints: of this node's ranks' latest calls.
        asks_at_s: when the ranks are asked, in seconds since 1970; 0 where there is no suspicion.
        suspected: what the ranks answered.
    """

    prints: Prints
    asks_at_s: float
    suspected: Seen | None


class Suspicion:
    """Compares the calls of one job, from start to restart."""

    def __init__(self) -> None:
        self._comparison = Comparison()
        self._asks_at_s = 0.0
        self._seen: Seen | None = None

    def note_calls(self, rank: int, calls: Iterable[Call]) -> None:
        """A rank of this node has told of calls."""
        self._comparison.note_calls(rank, calls)

    @property
    def told(self) -> NodeSuspicion:
        """For the other nodes."""
        seen = None if self._seen is None else strip(self._seen)
        return NodeSuspicion(self._comparison.read_prints(), self._asks_at_s, seen)

    def judge(
        self,
        others: Others,
        now_s: float,
        collect: Callable[[], Seen],
        read_source: Callable[[str], Sequence[str]],
    ) -> Verdict | None:
        """What doesn't fit together, once that is certain.

        Args:
            others: the other nodes.
            now_s: since 1970.
            collect: asks this node's ranks for all calls that are recorded.
            read_source: as in `explain_hang`.
        """
        heard = {node: state for node, (state, _) in others.items() if state is not None}
        for node, state in heard.items():
            self._comparison.note_node(node, state.prints)
        if self._seen is None:
            self._asks_at_s = self._choose([state.asks_at_s for state in heard.values()], bool(others), now_s)
            if not self._asks_at_s or now_s < self._asks_at_s:
                return None
            self._seen = collect()
        reports = dict(self._seen.reports)
        for state in heard.values():
            if state.suspected is not None and state.asks_at_s == self._asks_at_s:
                reports |= state.suspected.reports
        verdict = confirm(reports, read_source)
        if verdict is None and now_s >= self._asks_at_s + (_ANSWERED_S if others else 0.0):
            self._asks_at_s, self._seen = 0.0, None
            self._comparison.drop_suspicion(now_s)
        return verdict

    def _choose(self, asked_s: Iterable[float], has_others: bool, now_s: float) -> float:
        """When to ask: the earliest instant that any node has chosen."""
        if not self._comparison.is_awake(now_s):
            return 0.0
        chosen = [each for each in asked_s if each > now_s]
        if self._asks_at_s:
            chosen.append(self._asks_at_s)
        elif self._comparison.is_suspicious(now_s):
            chosen.append(math.ceil((now_s + _HEARD_S) / _ROUND_S) * _ROUND_S if has_others else now_s)
        return min(chosen, default=0.0)
