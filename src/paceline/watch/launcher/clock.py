"""Decides when a job has stood still for long enough to ask its ranks why.

Two clocks run. The first restarts at every sign of work: a collective issued or completed, a main thread at
another line, a core or a disk in use. The second restarts only at collectives. A job in which nothing happens
is considered stuck sooner than one in which a rank computes. The latter may be in a long validation, a
compilation or an infinite loop, which cannot be distinguished from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.watch.protocol.report import BUSY_SHARE, Beat, Process

# A rank with at least this I/O works, like one that uses BUSY_SHARE of a core: it may write a checkpoint to a
# slow disk, or read data from one.
BUSY_BYTES_PER_S = 4096.0
# Ranks that stand still for this long are asked whether their collectives match.
STALL_S = 2.0
# The time limit is multiplied by this while some rank computes.
PATIENCE = 10.0


@dataclass(frozen=True)
class Stillness:
    """The time for which a job, or a node's part of it, has stood still.

    Attributes:
        still_s: from the last sign of work to the last poll of the processes; what came since is unknown.
        uncollected_s: time since a collective was last issued or completed.
        has_waiting: whether some rank waits for others: in a collective, or to join them.
        silent_s: time since the last beat of the sleeping rank that has been silent longest. Its threads do
            not get Python's lock, such as in a process that cannot end.
    """

    still_s: float
    uncollected_s: float
    has_waiting: bool
    silent_s: float = 0.0

    @property
    def is_stalled(self) -> bool:
        """Whether it is time to check that the collectives match."""
        return self.has_waiting and self.uncollected_s >= STALL_S

    def is_stuck(self, hang_after_s: float) -> bool:
        """Return whether it is time for a verdict."""
        if self.has_waiting:
            return self.still_s >= hang_after_s or self.uncollected_s >= PATIENCE * hang_after_s
        # No rank waits for another: perhaps all wait for something outside, such as data or a lock.
        is_silent = self.silent_s >= hang_after_s
        return self.still_s >= (1.0 if is_silent else PATIENCE) * hang_after_s

    def join(self, other: Stillness) -> Stillness:
        """Return the stillness of both together."""
        return Stillness(
            min(self.still_s, other.still_s),
            min(self.uncollected_s, other.uncollected_s),
            self.has_waiting or other.has_waiting,
            max(self.silent_s, other.silent_s),
        )


class Clock:
    """The two clocks of one job.

    Args:
        now_s: from a monotonic clock, as all times here.
    """

    def __init__(self, now_s: float) -> None:
        self._worked_s = self._collected_s = self._polled_s = now_s
        self._latest: dict[int, Beat] = {}
        self._beat_s: dict[int, float] = {}
        self._silent_s = 0.0

    def note_beat(self, beat: Beat, now_s: float) -> None:
        """Restart the clocks if a rank's beat shows progress since its previous one."""
        before, self._latest[beat.rank] = self._latest.get(beat.rank), beat
        self._beat_s[beat.rank] = now_s
        if before is None or (before.issued, before.completed, before.phase) != (
            beat.issued,
            beat.completed,
            beat.phase,
        ):
            self._worked_s = self._collected_s = now_s
        elif before.place != beat.place:
            self._worked_s = now_s

    def note_processes(self, processes: Mapping[int, Process], since_s: float, now_s: float) -> None:
        """Restart the first clock if a rank has worked since the previous poll.

        Ranks in a collective do not count, because NCCL waits at full speed.

        Args:
            processes: by rank, with what they have used since the previous poll.
            since_s: time of the previous poll.
            now_s: time of this poll.
        """
        if since_s < self._collected_s:  # They may have used it before the last collective.
            return
        self._polled_s = now_s
        # A stopped rank is silent too, and may go on.
        silent = [
            now_s - self._beat_s[rank]
            for rank, process in processes.items()
            if process.state == "sleeping" and rank in self._beat_s
        ]
        self._silent_s = max(silent, default=0.0)
        for rank, process in processes.items():
            works = process.cpu_share > BUSY_SHARE or process.io_rate > BUSY_BYTES_PER_S
            if (works or process.state == "uninterruptible") and not _waits(self._latest.get(rank)):
                self._worked_s = now_s

    def note_change(self, now_s: float) -> None:
        """Restart both clocks because a rank has started or ended."""
        self._worked_s = self._collected_s = now_s

    def read(self, now_s: float) -> Stillness:
        """Return what both clocks show."""
        has_waiting = any(_waits(beat) for beat in self._latest.values())
        still_s = max(0.0, self._polled_s - self._worked_s)
        return Stillness(still_s, now_s - self._collected_s, has_waiting, self._silent_s)


def _waits(beat: Beat | None) -> bool:
    return beat is not None and (beat.is_waiting or beat.issued != beat.completed)
