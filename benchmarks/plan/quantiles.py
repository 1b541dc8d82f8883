"""The residuals of plans: the file that a picture is drawn from, and the ends of a conformal interval.

See `paceline.plan.fit`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

RESIDUALS = Path(__file__).parent / "residuals.csv"


def write_residuals(kind: str, rows: Iterable[tuple[str, float]]) -> None:
    """Replace the rows of a kind in the file: groups, with logarithms of predicted over measured."""
    kept = []
    if RESIDUALS.exists():
        with RESIDUALS.open(encoding="utf-8", newline="") as file:
            kept = [row for row in csv.reader(file) if row[0] not in (kind, "kind")]
    with RESIDUALS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("kind", "group", "predicted_over_measured"))
        found = [[kind, group, f"{math.exp(error):.3f}"] for group, error in rows]
        writer.writerows(sorted(kept + found))


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
