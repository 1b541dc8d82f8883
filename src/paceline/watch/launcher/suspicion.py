"""Decides when to ask all ranks for their calls, in a running job whose calls seem not to match.

On one node they are asked at once. With several nodes, launchers agree on an instant a few seconds ahead at
which each asks its ranks, because records go back only a few seconds; then they exchange the reports. Every
launcher reaches the same verdict, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from paceline.watch.launcher.nodes import EVERY_S, Others
from paceline.watch.protocol.report import Call, Seen, Verdict
from paceline.watch.reasoning.compare import Comparison, Prints, confirm, strip

# How long it takes until all nodes have read what one has written, and until it has read their answers.
_READ_S = 2.5 * EVERY_S
_ANSWERED_S = 4 * EVERY_S
# Nodes choose the next multiple of this, so that they choose the same instant without communicating.
_ROUND_S = 8.0


class Suspicion:
    """The comparison of one job's calls, from start to restart."""

    def __init__(self) -> None:
        self._comparison = Comparison()
        self._asks_at_s = 0.0
        self._seen: Seen | None = None

    def note_calls(self, rank: int, calls: Iterable[Call]) -> None:
        """Compare calls that a rank of this node has reported."""
        self._comparison.note_calls(rank, calls)

    @property
    def state(self) -> tuple[Prints, float, Seen | None]:
        """The state that the other nodes need: `prints`, `asks_at_s` and `suspected` of `NodeState`."""
        seen = None if self._seen is None else strip(self._seen)
        return self._comparison.read_prints(), self._asks_at_s, seen

    def judge(
        self,
        others: Others,
        now_s: float,
        collect: Callable[[], Seen],
        read_source: Callable[[str], Sequence[str]],
    ) -> Verdict | None:
        """Return the mismatch, once it is certain.

        Args:
            others: the other nodes.
            now_s: since 1970.
            collect: asks this node's ranks for all calls that are still recorded.
            read_source: as in `explain_hang`.
        """
        states = {node: state for node, (state, _) in others.items() if state is not None}
        for node, state in states.items():
            self._comparison.note_node(node, state.prints)
        if self._seen is None:
            self._asks_at_s = self._choose(
                [state.asks_at_s for state in states.values()], bool(others), now_s
            )
            if not self._asks_at_s or now_s < self._asks_at_s:
                return None
            self._seen = collect()
        reports = dict(self._seen.reports)
        for state in states.values():
            if state.suspected is not None and state.asks_at_s == self._asks_at_s:
                reports |= state.suspected.reports
        verdict = confirm(reports, read_source)
        if verdict is None and now_s >= self._asks_at_s + (_ANSWERED_S if others else 0.0):
            self._asks_at_s, self._seen = 0.0, None
            self._comparison.drop_suspicion(now_s)
        return verdict

    def _choose(self, asked_s: Iterable[float], has_others: bool, now_s: float) -> float:
        """Return when to ask: the earliest instant that any node has chosen, or 0 for not at all."""
        if not self._comparison.is_awake(now_s):
            return 0.0
        chosen = [each for each in asked_s if each > now_s]
        if self._asks_at_s:
            chosen.append(self._asks_at_s)
        elif self._comparison.is_suspicious(now_s):
            chosen.append(math.ceil((now_s + _READ_S) / _ROUND_S) * _ROUND_S if has_others else now_s)
        return min(chosen, default=0.0)
