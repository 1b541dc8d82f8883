"""The ends of a conformal interval, from residuals in groups; see `paceline.plan.fit`."""

from __future__ import annotations

from collections.abc import Sequence


def find_quantiles(residuals: Sequence[float], groups: Sequence[str], level: float) -> tuple[float, float]:
    """Return the lower and upper end of the central share of residuals, each group with the same weight.

    The ends are those of one more residual than there are, so that the share holds for a new one.
    """
    counts = {group: groups.count(group) for group in set(groups)}
    order = sorted(zip(residuals, (1 / counts[group] for group in groups), strict=True))
    total = len(counts) + 1
    tail = (1 - level) / 2 * total
    return _find_end(order, tail), _find_end(order[::-1], tail)


def _find_end(order: Sequence[tuple[float, float]], tail: float) -> float:
    """Return the value up to which the weights reach a sum."""
    passed = 0.0
    for value, weight in order:
        passed += weight
        if passed >= tail:
            return value
    return order[-1][0]
