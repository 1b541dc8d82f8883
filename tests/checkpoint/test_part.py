"""Parts of tensors: cut in any way, they overlap as their numbers do."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from paceline.checkpoint.part import Part, Run
from paceline.checkpoint.tensors import copy_blocks


def random_runs(size: int, draw: random.Random) -> tuple[Run, ...]:
    """Some disjoint runs of a dimension, in rising order; maybe none."""
    places = sorted(draw.sample(range(size + 1), min((size + 1) // 2, draw.randint(0, 2)) * 2))
    return tuple(zip(places[::2], places[1::2], strict=True))


def indices(part: Part) -> torch.Tensor:
    """Return the numbers of a part, if the whole counts up."""
    whole = torch.arange(math.prod(part.whole)).reshape(part.whole)
    for dim, runs in enumerate(part.runs):
        kept = [i for start, stop in runs for i in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(kept, dtype=torch.int64))
    return whole


def test_any_parts_overlap_as_their_numbers_do() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 3)))
        one, other = (Part(shape, tuple(random_runs(size, draw) for size in shape)) for _ in range(2))
        numbers, others = indices(one), indices(other)
        assert (one.shape, one.num_elements) == (tuple(numbers.shape), numbers.numel())
        shared = [int(n) for here, _ in one.overlap(other) for n in numbers[here].reshape(-1)]
        assert sorted(shared) == sorted(set(numbers.reshape(-1).tolist()) & set(others.reshape(-1).tolist()))
        for here, there in one.overlap(other):
            assert torch.equal(numbers[here], others[there])


def test_a_part_is_put_together_from_others() -> None:
    whole = torch.arange(6 * 8).reshape(6, 8)
    sources = [Part((6, 8), (rows, ((0, 2), (4, 6)))) for rows in (((0, 3),), ((3, 6),))]
    sources += [Part((6, 8), (((0, 6),), ((2, 4), (6, 8))))]
    for wanted in (Part.all_of((6, 8)), Part((6, 8), (((1, 5),), ((1, 3), (5, 8))))):
        found = torch.empty(wanted.shape, dtype=torch.int64)
        for part in sources:
            copy_blocks(part, indices(part), wanted, found)
        assert torch.equal(found, whole.flatten()[indices(wanted)])


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (2, 3, 4), (0, 3), (3, 0)])
def test_blocks_follow_each_other_and_are_small(shape: tuple[int, ...]) -> None:
    for most in (1, 2, 3, 5, 100):
        blocks = list(Part.all_of(shape).blocks(most))
        assert all(block.num_elements <= most for block in blocks)
        found = list(itertools.chain.from_iterable(indices(block).reshape(-1).tolist() for block in blocks))
        assert found == list(range(math.prod(shape)))


@pytest.mark.parametrize("runs", [((2, 1),), ((0, 3), (2, 4)), ((0, 9),), ((-1, 2),), ((3, 4), (0, 1))])
def test_runs_that_can_not_be_are_refused(runs: tuple[Run, ...]) -> None:
    with pytest.raises(ValueError, match="run"):
        Part((8,), (runs,)).check()
    with pytest.raises(ValueError, match="dimensions"):
        Part((8, 8), (runs,)).check()
