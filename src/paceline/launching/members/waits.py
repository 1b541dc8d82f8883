"""The waits of a job's nodes, all derived from the time after which a node counts as lost."""

from __future__ import annotations

from dataclasses import dataclass

_BEATS = 6
_LEASES = 5


@dataclass(frozen=True)
class Waits:
    """All waits of a job's nodes; the short ones follow from `detect_s`.

    Attributes:
        detect_s: a node is lost if its beat has not changed for this long.
        join_s: longest wait for missing nodes, or for the store.
        last_call_s: wait of the first round for more nodes, once it has the fewest that it needs.
    """

    detect_s: float = 3.0
    join_s: float = 600.0
    last_call_s: float | None = None

    @property
    def beat_s(self) -> float:
        """The time between two beats."""
        return self.detect_s / _BEATS

    @property
    def lease_s(self) -> float:
        """The time after which a node outside of a round may end it, because none of its nodes beats."""
        return self.detect_s * _LEASES

    @property
    def held_s(self) -> float:
        """The time for which ranks may run after a stored beat; they have ended before `lease_s`."""
        return 0.8 * self.lease_s

    @property
    def first_call_s(self) -> float:
        """The time for which the first round waits for more nodes."""
        return 3 * self.detect_s if self.last_call_s is None else self.last_call_s

    def __str__(self) -> str:
        return (
            f"a node is lost after {self.detect_s:g} s without a beat (--detect-s); it beats every "
            f"{self.beat_s:g} s, the first round waits {self.first_call_s:g} s for more nodes, a round "
            f"waits {self.join_s:g} s for missing ones (--join-timeout), and ranks end {self.held_s:g} s "
            "after their node's last beat"
        )
