"""Compares samples of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Of the largest number. Copies that differ by rounding alone stay below the first; what one optimizer step
# leaves in float32 is above.
_DIFFERS = 1e-4
_EQUALS = 1e-6


def differ(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two samples of the same tensors differ by more than rounding."""
    return _measure(one, other) > _DIFFERS


def are_equal(first: Sequence[float], *others: Sequence[float], within: float = _EQUALS) -> bool:
    """Return whether samples are the same, up to a few bits or to a part of the largest number."""
    return all(_measure(first, one) <= within for one in others)


def _measure(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference as a part of the largest number; NaN if they cannot be compared."""
    if not one or not other or len(one) != len(other) or not all(map(math.isfinite, [*one, *other])):
        return math.nan
    largest = max(map(abs, [*one, *other]))
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) / largest if largest else 0.0
