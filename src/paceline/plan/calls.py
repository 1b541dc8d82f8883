"""Describes the collectives of a step: which call, of how many bytes, how often, over which ranks.

Sizes follow nccl-tests (doc/PERFORMANCE.md): the vector of all_reduce, reduce and broadcast; what a rank
receives in all_gather, brings to reduce_scatter, and sends in all_to_all, its own part included; what the
root has in gather and scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
# An exact sum by messages sends smaller vectors whole: that of `comm/exchange.py`, which needs torch.
WHOLE_BYTES = 8 << 10


@dataclass(frozen=True)
class StepCall:
    """A collective that a rank makes a number of times in a step, one call after the other.

    Attributes:
        operation: a key of `BUS_FACTORS`; or `exact_sum` (`comm/exchange.py`).
        num_bytes: size of one call, as the module defines it.
        over: the ranks: an axis; `dp`, all ranks that train on different microbatches; `ep_data` or `ep_cp`,
            the ranks of ep that differ in their data, or in their place of cp.
        num_ranks: of each group.
        times: calls per step.
        num_subtrees: of an exact sum, the subtrees that the rank brings.
    """

    operation: str
    num_bytes: float
    over: str
    num_ranks: int
    times: int = 1
    num_subtrees: int = 1

    @property
    def sent_bytes(self) -> float:
        """The bytes that a rank sends in a step; of an exact sum, by messages."""
        n = self.num_ranks
        if self.operation != "exact_sum":
            factor = BUS_FACTORS[self.operation](n)
        elif self.num_bytes <= WHOLE_BYTES:
            factor = self.num_subtrees * (n - 1)
        else:
            factor = (self.num_subtrees + 1) * (n - 1) / n
        return self.times * factor * self.num_bytes


def count_sent(calls: Iterable[StepCall]) -> float:
    """Return the bytes that a rank sends in a step by all calls together."""
    return sum(call.sent_bytes for call in calls)


def all_reduce(num_bytes: float, over: str, num_ranks: int, times: int = 1) -> StepCall:
    """Return the library's sum of vectors of so many bytes."""
    return StepCall("all_reduce", num_bytes, over, num_ranks, times)


def all_gather(num_bytes: float, over: str, num_ranks: int, times: int = 1) -> StepCall:
    """Return the library's gather, whose result has so many bytes."""
    return StepCall("all_gather", num_bytes, over, num_ranks, times)


def reduce_scatter(num_bytes: float, over: str, num_ranks: int, times: int = 1) -> StepCall:
    """Return the sum of which each rank keeps a part: on CPUs an all-to-all and an addition."""
    return StepCall("reduce_scatter", num_bytes, over, num_ranks, times)


def all_to_all(num_bytes: float, over: str, num_ranks: int, times: int = 1) -> StepCall:
    """Return the exchange in which a rank has so many bytes, its own part included."""
    return StepCall("all_to_all", num_bytes, over, num_ranks, times)
