"""What a launcher keeps of its ranks for when one fails: last words, how far they were, how they ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from paceline.watch.protocol.report import Beat, Process, Report, Seen


class RankEnds:
    """The ranks of one attempt, from its start on."""

    def __init__(self) -> None:
        self._issued: dict[int, dict[str, int]] = {}
        self._statuses: dict[int, int] = {}
        self._left: set[int] = set()
        self.last: dict[int, Report] = {}
        """By rank, its report with last words."""
        self.closing: dict[int, Report] = {}
        """By rank that came to its script's end, the report with all calls that it has recorded."""

    def note_beat(self, beat: Beat) -> None:
        """A sign of life has come."""
        # A rank that has destroyed its groups tells nothing of them any more.
        self._issued.setdefault(beat.rank, {}).update(beat.issued)
        if beat.phase == "leaving":
            self._left.add(beat.rank)

    def note_report(self, report: Report) -> None:
        """A report has come."""
        if report.last is not None:
            self.last[report.rank] = report
        elif report.is_closing:
            self.closing[report.rank] = report

    def note_status(self, rank: int, status: int) -> None:
        """A rank has ended with this exit code or signal."""
        self._statuses[rank] = status

    def may_end(self, report: Report) -> bool:
        """Whether a rank that has answered, and is in no call, may be on its way out."""
        return report.rank not in self.last and all(call.done for call in report.calls)

    def add_to(self, seen: Seen, processes: Mapping[int, Process]) -> Seen:
        """What was seen, with what is known of ranks that have ended since or said their last.

        Args:
            seen: the ranks of this node.
            processes: of these, looked at since.
        """
        ended = {rank: p for rank, p in processes.items() if p.state == "ended"}
        silent = {
            rank: Report(rank, time.time(), "leaving", {}, (), (), issued=self._issued[rank])
            for rank in ended.keys() | self._left
            if rank in self._issued
        }
        known = {rank: replace(p, exit_code=self._find_exit_code(rank, p)) for rank, p in ended.items()}
        reports = silent | seen.reports | self.last
        return replace(seen, processes=seen.processes | known, reports=reports)

    def _find_exit_code(self, rank: int, process: Process) -> int | None:
        if process.exit_code is not None:
            return process.exit_code
        # The status comes a moment after the end; a script that ends otherwise has last words.
        came_to_its_end = rank in self._left and rank not in self.last
        return self._statuses.get(rank, 0 if came_to_its_end else None)


def is_felt(seen: Seen) -> bool:
    """Whether a rank has failed of what another one did, which may be on another node."""
    words = [report.last for report in seen.reports.values() if report.last is not None]
    return any(last.follower or last.kind == "abort" for last in words)
