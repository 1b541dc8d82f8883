"""Keeps what is known of ranks for when one fails: last reports, progress and exit statuses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from paceline.watch.protocol.report import Beat, Process, Report, Seen


class RankEnds:
    """The last reports, progress and exit statuses of one attempt's ranks."""

    def __init__(self) -> None:
        self._issued: dict[int, dict[str, int]] = {}
        self._statuses: dict[int, int] = {}
        self._left: set[int] = set()
        self.last: dict[int, Report] = {}
        """By rank, the report that names what ended it."""
        self.closing: dict[int, Report] = {}
        """By rank that reached its script's end, the report with all calls that it has recorded."""

    def note_beat(self, beat: Beat) -> None:
        """Keep a rank's progress, and whether it is leaving."""
        # A rank that has destroyed its groups no longer reports them.
        self._issued.setdefault(beat.rank, {}).update(beat.issued)
        if beat.phase == "leaving":
            self._left.add(beat.rank)

    def note_report(self, report: Report) -> None:
        """Keep a report if it is a rank's last or closing one."""
        if report.last is not None:
            self.last[report.rank] = report
        elif report.is_closing:
            self.closing[report.rank] = report

    def note_status(self, rank: int, status: int) -> None:
        """Keep a rank's exit code or signal."""
        self._statuses[rank] = status

    def may_end(self, report: Report) -> bool:
        """Return whether a rank that has answered, and is in no call, may be about to end."""
        return report.rank not in self.last and all(call.done for call in report.calls)

    def add_to(self, seen: Seen, processes: Mapping[int, Process]) -> Seen:
        """Return the job as seen, with what is known of ranks that have ended since or sent a last report.

        Args:
            processes: their processes, polled since.
        """
        unknown = Report(-1, time.time(), "leaving", {}, (), ())
        ended = {rank: p for rank, p in processes.items() if p.state == "ended"}
        silent = {
            rank: replace(self.closing.get(rank, unknown), rank=rank, issued=self._issued[rank])
            for rank in ended.keys() | self._left
            if rank in self._issued
        }
        known = {rank: replace(p, exit_code=self._find_exit_code(rank, p)) for rank, p in ended.items()}
        reports = silent | seen.reports | self.last
        return replace(seen, processes=seen.processes | known, reports=reports)

    def _find_exit_code(self, rank: int, process: Process) -> int | None:
        if process.exit_code is not None:
            return process.exit_code
        # The status arrives a moment after the end; a script that ends otherwise sends a last report.
        came_to_its_end = rank in self._left and rank not in self.last
        return self._statuses.get(rank, 0 if came_to_its_end else None)


def is_felt(seen: Seen) -> bool:
    """Return whether a rank failed because of another one, which may be on another node."""
    words = [report.last for report in seen.reports.values() if report.last is not None]
    return any(last.follower or last.kind == "abort" for last in words)
