"""Chooses where a model is cut into stages, from the work of its parts."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

# Stages begin at one of at most so many places: the time to choose grows with their square.
_MOST_PLACES = 256


@lru_cache(maxsize=64)
def find_starts(costs: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
    """Return the cut into consecutive stages whose most expensive stage costs least.

    Args:
        costs: by segment; the first one is what comes before the first block.
        num_stages: at most the number of segments.

    Returns:
        The first segment of each stage, and the number of segments.
    """
    num_segments = len(costs)
    assert num_segments >= num_stages
    if num_segments > _MOST_PLACES >= num_stages:
        # A cell that is called at every position has many. Neighbours are tried as one.
        places = [number * num_segments // _MOST_PLACES for number in range(_MOST_PLACES + 1)]
        joined = tuple(sum(costs[start:end]) for start, end in pairwise(places))
        return tuple(places[start] for start in find_starts(joined, num_stages))
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # By the end of a part: (the largest cost, the sum of squares, the starts). The squares make cuts even
    # where the largest cost leaves a choice.
    best: list[tuple[float, float, tuple[int, ...]] | None] = [
        (sums[end], sums[end] ** 2, (0,)) if end else None for end in range(num_segments + 1)
    ]
    for stage in range(1, num_stages):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (num_segments + 1)
        for end in range(stage + 1, num_segments + 1):
            choices = []
            for start in range(stage, end):
                before = best[start]
                if before is not None:
                    own = sums[end] - sums[start]
                    choices.append((max(before[0], own), before[1] + own**2, (*before[2], start)))
            following[end] = min(choices) if choices else None
        best = following
    found = best[num_segments]
    assert found is not None
    return (*found[2], num_segments)
