"""Describes which elements of a whole tensor a rank holds, dimension by dimension.

A layout cuts every dimension separately: tp takes one or several runs of a dimension (three for packed
queries, keys and values), dp_shard a run of rows. So a rank holds the product of one list of runs per
dimension, in the order of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

# More than any layout makes; a malicious file could otherwise request any amount of memory.
_MAX_CELLS = 1 << 24

Run = tuple[int, int]
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """The elements of a whole tensor that one rank holds, themselves a tensor.

    Attributes:
        whole: shape of the whole tensor.
        runs: for each dimension the runs of indices, as (start, stop), rising and disjoint.
    """

    whole: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    @staticmethod
    def all_of(shape: Sequence[int]) -> Part:
        """Return the whole tensor."""
        return Part(tuple(shape), tuple(((0, size),) for size in shape))

    @staticmethod
    def of_rows(shape: Sequence[int], runs: tuple[Run, ...]) -> Part:
        """Return some runs of rows, whole in all dimensions but the first; a scalar is whole."""
        return Part(tuple(shape), (runs, *(((0, size),) for size in shape[1:])) if shape else ())

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part as a tensor of its own."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @cached_property
    def num_elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self.shape == self.whole

    def check(self) -> None:
        """Raise `ValueError` unless the runs are within the whole, rising and disjoint."""
        if len(self.runs) != len(self.whole):
            raise ValueError(f"a part with {len(self.runs)} dimensions of a tensor with {len(self.whole)}")
        for size, runs in zip(self.whole, self.runs, strict=True):
            end = 0
            for start, stop in runs:
                if not end <= start <= stop <= size:
                    raise ValueError(f"the run [{start}, {stop}) in a dimension of {size}")
                end = stop

    def overlap(self, other: Part) -> Iterator[tuple[Slices, Slices]]:
        """Yield the blocks that both contain: their places in this part and in the other one."""
        found = [_overlap(*pair) for pair in zip(self.runs, other.runs, strict=True)]
        for block in product(*found):
            yield tuple(own for own, _ in block), tuple(theirs for _, theirs in block)

    def blocks(self, max_elements: int) -> Iterator[Part]:
        """Yield it in consecutive blocks, in row-major order of the part, of up to `max_elements` elements.

        Only a part with one run per dimension can be cut.
        """
        shape = self.shape
        if not all(shape):
            return
        starts = [runs[0][0] for runs in self.runs]
        # The first dimension in which one index fits; those before it are iterated index by index.
        dim = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= max_elements), len(shape))
        if dim == len(shape):
            yield self
            return
        step = max(1, max_elements // math.prod(shape[dim + 1 :]))
        for outer in product(*(range(size) for size in shape[:dim])):
            for first in range(0, shape[dim], step):
                places = [*outer, first, *([0] * (len(shape) - dim - 1))]
                sizes = [*([1] * dim), min(step, shape[dim] - first), *shape[dim + 1 :]]
                runs = tuple(
                    ((start + place, start + place + size),)
                    for start, place, size in zip(starts, places, sizes, strict=True)
                )
                yield Part(self.whole, runs)


def count_covers(parts: Sequence[Part]) -> tuple[int, int]:
    """Return how often parts of one whole cover its elements, at least and at most.

    Raises:
        ValueError: for parts that are cut too finely to have been cut by a layout.
    """
    whole = parts[0].whole
    edges = [
        sorted({0, size, *(edge for part in parts for run in part.runs[dim] for edge in run)})
        for dim, size in enumerate(whole)
    ]
    # Between neighbouring edges all elements are covered equally, so one count represents them.
    shape = [len(each) - 1 for each in edges]
    if math.prod(shape) > _MAX_CELLS:
        raise ValueError(f"cut into {math.prod(shape)} pieces")
    counts = np.zeros(shape, np.int32)
    if not counts.size:
        return 1, 1
    for part in parts:
        cells = [
            [n for start, stop in runs for n in range(each.index(start), each.index(stop))]
            for runs, each in zip(part.runs, edges, strict=True)
        ]
        counts[np.ix_(*cells) if cells else ()] += 1
    return int(counts.min()), int(counts.max())


def _overlap(own: Sequence[Run], other: Sequence[Run]) -> list[tuple[slice, slice]]:
    """Return what two lists of runs share, as places in the one and in the other."""
    found = []
    own_place = 0
    for start, stop in own:
        other_place = 0
        for other_start, other_stop in other:
            first, last = max(start, other_start), min(stop, other_stop)
            if first < last:
                here, there = own_place + first - start, other_place + first - other_start
                found.append((slice(here, here + last - first), slice(there, there + last - first)))
            other_place += other_stop - other_start
        own_place += stop - start
    return found
