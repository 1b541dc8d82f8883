"""Computes a measured number's median and its confidence interval."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import comb
from statistics import median

_MOST_WIDE = 1.25


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements with its confidence interval.

    The ends of the interval are two of the measurements, without any assumption on their distribution (David
    and Nagaraja 2003, "Order Statistics", section 7.1): the k-th smallest and the k-th largest enclose the
    true median with probability 1 - 2 P(Binomial(n, 1/2) < k). The largest k that still reaches the wanted
    confidence is taken. Below six measurements none gives 95%; then it is the whole range, and `confidence`
    is that of the range.

    Attributes:
        median: of the values.
        low: lower end of the interval.
        high: upper end.
        confidence: the probability that the true median is between them, for independent measurements.
        num_values: how many were taken.
    """

    median: float
    low: float
    high: float
    confidence: float
    num_values: int

    @classmethod
    def of(cls, values: Iterable[float], confidence: float = 0.95) -> Spread:
        """Return the spread of one value or more."""
        ordered = sorted(values)
        n = len(ordered)
        assert n > 0, "a spread needs at least one measurement"
        k, covers = 1, _cover(n, 1)
        outside = 1 + n  # ways in which fewer than k + 1 of n values are below the median
        while 2 * (k + 1) <= n + 1 and (more := _cover(n, outside)) >= confidence:
            k, covers = k + 1, more
            outside += comb(n, k)
        return cls(median(ordered), ordered[k - 1], ordered[n - k], covers, n)

    @property
    def says_nothing(self) -> bool:
        """Whether the interval is so wide that a difference of a quarter would not be seen."""
        return self.num_values > 1 and self.high > _MOST_WIDE * max(self.low, 0.0)

    def __format__(self, spec: str) -> str:
        median = f"{self.median:{spec}}"
        return median if self.low == self.high else f"{median} ({self.low:{spec}}..{self.high:{spec}})"


def _cover(n: int, outside: int) -> float:
    """Return the probability that two of `n` values enclose the median, by the ways to be on one side of
    it."""
    share: float = outside / (1 << (n - 1))  # of integers, as floats end at 2**1024
    return max(0.0, 1 - share)
