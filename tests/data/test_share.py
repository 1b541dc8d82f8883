from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.data.share import owned_microbatches, split_microbatches


@given(num_samples=st.integers(0, 500), size=st.integers(1, 70))
def test_microbatches_cover_the_batch_and_only_the_last_is_ragged(num_samples: int, size: int) -> None:
    blocks = split_microbatches(num_samples, size)
    assert [place for start, stop in blocks for place in range(start, stop)] == list(range(num_samples))
    assert all(stop - start == size for start, stop in blocks[:-1])
    assert all(stop > start for start, stop in blocks)


@given(num_microbatches=st.integers(0, 100), world_size=st.integers(1, 40))
def test_ranks_own_balanced_neighbouring_blocks(num_microbatches: int, world_size: int) -> None:
    blocks = [owned_microbatches(num_microbatches, world_size, rank) for rank in range(world_size)]
    assert [number for block in blocks for number in block] == list(range(num_microbatches))
    sizes = [len(block) for block in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_examples() -> None:
    assert split_microbatches(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert [list(owned_microbatches(3, 2, rank)) for rank in range(2)] == [[0, 1], [2]]
    assert [list(owned_microbatches(1, 3, rank)) for rank in range(3)] == [[0], [], []]
