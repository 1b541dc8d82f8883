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
    return _is_sample(one, other) and _distance(one, other) > _DIFFERS * _size(one, other)


def are_equal(*samples: Sequence[float]) -> bool:
    """Return whether samples are the same, up to a few bits."""
    first = samples[0]
    return all(
        _is_sample(first, one) and _distance(first, one) <= _EQUALS * _size(first, one) for one in samples
    )


def is_near(one: Sequence[float], other: Sequence[float], within: float = _DIFFERS) -> bool:
    """Return whether two samples are equal up to rounding, or to a part of the largest number."""
    return _is_sample(one, other) and _distance(one, other) <= within * _size(one, other)


def _is_sample(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    return bool(one) and bool(other) and len(one) == len(other) and all(map(math.isfinite, [*one, *other]))  # type: ignore[arg-type, misc]


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _size(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(value) for value in [*one, *other])
