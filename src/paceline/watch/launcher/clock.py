"""Decides when a job has stood still for so long that it is asked why.

Two clocks run. One goes back to zero with every sign of work anywhere: a collective issued or completed, a
main thread at another line, a core or a disk in use. The other with collectives alone. A job in which
nothing at all happens is stuck sooner than one in which a rank computes: that may be a long validation, a
compiler or a loop without end, and from outside they look alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.watch.protocol.report import BUSY_SHARE, Beat, Process

# A rank that reads or writes so much works, as one with BUSY_SHARE of a core does: a checkpoint on its way
# to a slow disk, or data from there.
BUSY_BYTES_PER_S = 4096.0
# Ranks that stand still for so long are asked whether their collectives match.
STALL_S = 2.0
# A job in which somebody computes is given so many times as long.
PATIENCE = 10.0


@dataclass(frozen=True)
class Stillness:
    """For how long a job, or a node's part of it, has stood still.

    Attributes:
        still_s: from the last sign of work to the last look at the processes: what came since isn't known.
        uncollected_s: since a collective was last issued or completed.
        has_waiting: whether some rank waits for others: in a collective, or to join them.
    """

    still_s: float
    uncollected_s: float
    has_waiting: bool

    @property
    def is_stalled(self) -> bool:
        """Whether it is time to ask if the collectives match."""
        return self.has_waiting and self.uncollected_s >= STALL_S

    def is_stuck(self, hang_after_s: float) -> bool:
        """Whether it is time for a verdict."""
        if self.has_waiting:
            return self.still_s >= hang_after_s or self.uncollected_s >= PATIENCE * hang_after_s
        # Nobody waits for anybody: perhaps they all wait for something outside, data or a lock.
        return self.still_s >= PATIENCE * hang_after_s

    def join(self, other: Stillness) -> Stillness:
        """Of both together."""
        return Stillness(
            min(self.still_s, other.still_s),
            min(self.uncollected_s, other.uncollected_s),
            self.has_waiting or other.has_waiting,
        )


class Clock:
    """Keeps both times of one job.

    Args:
        now_s: from a monotonic clock, as all times here.
    """

    def __init__(self, now_s: float) -> None:
        self._worked_s = self._collected_s = self._looked_s = now_s
        self._latest: dict[int, Beat] = {}

    def note_beat(self, beat: Beat, now_s: float) -> None:
        """A rank has told of itself."""
        before, self._latest[beat.rank] = self._latest.get(beat.rank), beat
        if before is None or (before.issued, before.completed, before.phase) != (
            beat.issued,
            beat.completed,
            beat.phase,
        ):
            self._worked_s = self._collected_s = now_s
        elif before.place != beat.place:
            self._worked_s = now_s

    def note_processes(self, processes: Mapping[int, Process], since_s: float, now_s: float) -> None:
        """Ranks have been looked at. Those in a collective don't count: NCCL waits at full speed.

        Args:
            processes: by rank, with what they have used since the look before.
            since_s: when that was.
            now_s: when this look was.
        """
        if since_s < self._collected_s:  # they may have used it before the last collective
            return
        self._looked_s = now_s
        for rank, process in processes.items():
            works = process.cpu_share > BUSY_SHARE or process.io_rate > BUSY_BYTES_PER_S
            if (works or process.state == "uninterruptible") and not _waits(self._latest.get(rank)):
                self._worked_s = now_s

    def note_change(self, now_s: float) -> None:
        """A rank has started or ended."""
        self._worked_s = self._collected_s = now_s

    def read(self, now_s: float) -> Stillness:
        """How both clocks stand."""
        has_waiting = any(_waits(beat) for beat in self._latest.values())
        still_s = max(0.0, self._looked_s - self._worked_s)
        return Stillness(still_s, now_s - self._collected_s, has_waiting)


def _waits(beat: Beat | None) -> bool:
    return beat is not None and (beat.is_waiting or beat.issued != beat.completed)
