"""Compares the collectives of a running job: all ranks are asked now and then for what they have called.

Some mismatches stop nothing: gloo adds integers to floats of the same width, and reduces with each rank's own
operation. Records go back only a few seconds, so the launchers of several nodes ask at the same instants,
which are multiples of powers of two of seconds, and exchange the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.watch.launcher.nodes import EVERY_S, Others
from paceline.watch.protocol.report import Report, Verdict
from paceline.watch.reasoning.running import choose_calls, confirm

# A rank's time for each call in its answer, and the share of its time that answers may take.
_CALL_S = 40e-6
_SHARE = 0.002
_SHORTEST_S = 2.0
# How long it takes until all nodes have read each other's answers.
_ANSWERED_S = 4 * EVERY_S


class RunningCalls:
    """The comparison of one job's calls, from start to restart; times are in seconds since 1970.

    Attributes:
        asked_at_s: the instant at which ranks were last asked.
        answers: what the other nodes need of their answers.
    """

    def __init__(self, now_s: float) -> None:
        self.asked_at_s = now_s
        self._every_s = _SHORTEST_S
        self._reports: dict[int, Report] = {}
        self.answers: dict[int, Report] = {}
        self._num_answers = 0

    def judge(
        self,
        others: Others,
        now_s: float,
        collect: Callable[[], dict[int, Report]],
        read_source: Callable[[str], Sequence[str]],
    ) -> Verdict | None:
        """Return a mismatch, once it is certain.

        Args:
            collect: asks this node's ranks for all calls that are still recorded.
            read_source: as in `explain_hang`.
        """
        every_s = max(self._every_s, _ANSWERED_S if others else 0.0)
        asks_at_s = now_s // every_s * every_s
        if asks_at_s > self.asked_at_s:
            self._reports, self.asked_at_s, self._num_answers = collect(), asks_at_s, 0
            self.answers = choose_calls(self._reports) if others else {}
            most = max((len(report.calls) for report in self._reports.values()), default=0)
            self._every_s = 2.0 ** math.ceil(math.log2(max(_SHORTEST_S, most * _CALL_S / _SHARE)))
        elif now_s > self.asked_at_s + _ANSWERED_S:
            self._reports, self.answers = {}, {}
        states = [state for state, _ in others.values() if state is not None]
        answers = [self._reports, *(s.answers for s in states if s.asked_at_s == self.asked_at_s)]
        if not self._reports or len(answers) == self._num_answers:
            return None
        self._num_answers = len(answers)
        return confirm(
            {rank: report for some in reversed(answers) for rank, report in some.items()}, read_source
        )
