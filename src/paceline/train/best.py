"""The best evaluation of a run, whose checkpoint is kept and by which training stops early."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Best:
    """The lowest value that `keep_best` was given.

    Attributes:
        step: after which it was given.
        value: the lowest.
        num_since: later values, none of which was lower.
    """

    step: int
    value: float
    num_since: int = 0


def choose_best(best: Best | None, step: int, value: float) -> Best:
    """Return the best after another value; one that is not a number is never it, except as the first."""
    if best is None or value < best.value or best.value != best.value:
        return Best(step, value)
    return replace(best, num_since=best.num_since + 1)
