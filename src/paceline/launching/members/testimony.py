"""A launcher's view of its witness: the number of the last entry, and when to ask for it."""

from __future__ import annotations

from collections.abc import Collection

from paceline.launching.members.witness import Entry, WitnessLine
from paceline.launching.members.world import NodeWorld, Waits

_NEVER = float("-inf")


class Testimony:
    """The answers of the witness; without a witness, they are empty.

    Attributes:
        has_read: whether the record was read, or there is no witness.
        last_round: of a job of this name that ended before.
    """

    def __init__(self, line: WitnessLine | None, waits: Waits, now: float) -> None:
        self._line, self._waits = line, waits
        self.has_read = line is None
        self.last_round = 0
        self._number, self._read_s, self._firm_s = 0, _NEVER, now

    @property
    def is_there(self) -> bool:
        """Whether the job has a witness."""
        return self._line is not None

    @property
    def trouble(self) -> str:
        """The reason why the witness does not answer; empty if it does, or if there is none."""
        return "" if self._line is None else self._line.trouble

    @property
    def is_wrong(self) -> bool:
        """Whether what was named as the witness is none."""
        return self._line is not None and self._line.is_wrong

    def ask(self, now: float, *, is_idle: bool, is_firm: bool) -> None:
        """Read the record while no world trains.

        Args:
            now: the monotonic clock.
            is_idle: whether this launcher leads or seeks, and no world trains.
            is_firm: whether it follows a leader, or has a quorum.
        """
        if is_firm:
            self._firm_s = now
        if self._line is not None and is_idle and now - self._read_s >= self._waits.probe_s:
            self._read_s = now
            self._line.read()

    def note(self, last: Entry | None) -> None:
        """Take note of the last entry."""
        self.has_read = True
        if last is not None:
            self._number = max(self._number, last.number)

    def append(self, world: NodeWorld, *, is_final: bool = False) -> None:
        """Record a world behind the last entry."""
        if self._line is not None:
            self._line.append(Entry(self._number + 1, world, is_final))

    def may_take_over(self, world: NodeWorld | None, present: Collection[str], now: float) -> bool:
        """Return whether some launchers without a quorum may ask the witness for the next round.

        A member of the last world must be among them, and those with a quorum go first.
        """
        has_member = world is not None and any(member.key in present for member in world.members)
        return self.is_there and has_member and now - self._firm_s >= 2 * self._waits.detect_s
