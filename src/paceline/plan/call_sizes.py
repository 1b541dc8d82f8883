"""Defines what the size of a collective is, and how much of it a rank sends.

Sizes follow nccl-tests (doc/PERFORMANCE.md): the vector of all_reduce, reduce and broadcast; what a rank
receives in all_gather, brings to reduce_scatter, and sends in all_to_all, its own part included; what the
root has in gather and scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

# What a rank sends over a ring is the size times this factor of N, the minimum for any algorithm. nccl-tests
# define bus bandwidth by it (doc/PERFORMANCE.md).
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


def fit_line(seconds: Mapping[int, float], factor: float) -> tuple[float, float]:
    """Return the seconds of an empty call, and the bus bandwidth: from the smallest and the largest size.

    Args:
        seconds: of a call, by size in bytes; two sizes or more.
        factor: of the operation, as in `BUS_FACTORS`.
    """
    small, large = min(seconds), max(seconds)
    slope = max((seconds[large] - seconds[small]) / (large - small), 1e-13)
    return max(seconds[small] - slope * small, 1e-7), factor / slope
