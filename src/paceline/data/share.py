"""Distributes a global batch: cuts it into microbatches and assigns these to ranks.

The cut depends on the number of samples and the microbatch size alone, never on the world size. A rank always
computes whole microbatches, so a microbatch yields the same numbers on any rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from paceline.data.contents import Digests

if TYPE_CHECKING:
    from paceline.data.loader import Loader


@dataclass(repr=False)
class Share:
    """One rank's part of one global batch, as a `Loader` yields it.

    Attributes:
        epoch: the pass over the data, from 0.
        number: the global batch's number within the epoch, from 0.
        num_samples: samples of the whole global batch, over all ranks.
        num_owned: per rank, how many microbatches of the global batch it computes.
        turns: how many neighbouring ranks take microbatches in turns, see `list_numbers`.
        microbatches: this rank's microbatches as (number within the global batch, collated samples);
            empty where there are fewer microbatches than ranks.
        samples: per microbatch of this rank, the numbers of its samples within the global batch, which are
            the same on any layout.
        start: place of the global batch's first sample in the epoch's order.
        last: whether the epoch ends with this global batch.
        source: the loader that it came from, which wants to hear when it was consumed.
        by_rank: samples of the epoch that each data rank has drawn from its own data, with this batch;
            empty if the loader distributes the data.
        digests: of samples that every rank has read for this global batch.
    """

    epoch: int
    number: int
    num_samples: int
    num_owned: tuple[int, ...]
    microbatches: list[tuple[int, Any]]
    samples: list[range] = field(default_factory=list)
    start: int = 0
    last: bool = False
    source: Loader | None = field(default=None, repr=False, compare=False)
    by_rank: tuple[int, ...] = ()
    digests: Digests = field(default_factory=dict, repr=False, compare=False)
    turns: int = 1

    def __repr__(self) -> str:
        """Name the global batch and this share of it; the samples are in `microbatches`."""
        return (
            f"Share({len(self.microbatches)} of {self.num_microbatches} microbatches of batch {self.number} "
            f"in epoch {self.epoch}, {self.num_samples} samples)"
        )

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the whole global batch, over all ranks."""
        return sum(self.num_owned)

    @property
    def compared_digests(self) -> Digests:
        """The digests of the samples without fields that differ from reading to reading."""
        left_out = () if self.source is None else self.source.random_fields
        return {name: each for name, each in self.digests.items() if name not in left_out}


def split_microbatches(num_samples: int, microbatch_size: int) -> list[tuple[int, int]]:
    """Cut `num_samples` into microbatches, given as (start, stop); the last one may be smaller."""
    assert num_samples >= 0, num_samples
    assert microbatch_size >= 1, microbatch_size
    return [
        (start, min(start + microbatch_size, num_samples)) for start in range(0, num_samples, microbatch_size)
    ]


def list_numbers(num_owned: tuple[int, ...], turns: int, rank: int) -> range:
    """Return the numbers of the microbatches that a rank computes.

    Args:
        num_owned: per rank, how many.
        turns: how many neighbouring ranks take the microbatches of their block in turns; with 1, each rank
            has a block of consecutive ones.
        rank: whose.
    """
    first = rank - rank % turns
    start, stop = sum(num_owned[:first]), sum(num_owned[: first + turns])
    return range(start, stop) if turns == 1 else range(start + rank % turns, stop, turns)


def owned_microbatches(
    num_microbatches: int, world_size: int, rank: int, num_slots: int | None = None, turns: int = 1
) -> range:
    """Return the numbers of the microbatches that a rank computes.

    They are a block of `num_microbatches // world_size`, with one more on the first `num_microbatches %
    world_size` ranks. It may be empty, but never on rank 0 alone.

    Args:
        num_microbatches: of the global batch.
        rank: one of these.
        num_slots: where gradients are compressed, the number of slots, a multiple of `world_size`; or that
            of islands, a multiple or a divisor. Microbatches are distributed over slots as above. A rank
            computes those of its slots. Several ranks of a slot share its microbatches as above.
        turns: as in `Share`; of the ranks that share a slot.
    """
    assert num_microbatches >= 0, num_microbatches
    assert 0 <= rank < world_size, (rank, world_size)
    if turns > 1 and num_slots is None:
        return list_numbers(count_owned(num_microbatches, world_size), turns, rank)
    if num_slots is not None and num_slots < world_size:
        sharing = world_size // num_slots
        block = owned_microbatches(num_microbatches, num_slots, rank // sharing)
        own = owned_microbatches(len(block), sharing, rank % sharing, turns=turns)
        return range(block.start + own.start, block.start + own.stop, own.step)
    if num_slots is not None:
        per_rank = num_slots // world_size
        first = owned_microbatches(num_microbatches, num_slots, rank * per_rank)
        last = owned_microbatches(num_microbatches, num_slots, (rank + 1) * per_rank - 1)
        return range(first.start, last.stop)
    size, num_larger = divmod(num_microbatches, world_size)
    start = rank * size + min(rank, num_larger)
    return range(start, start + size + (rank < num_larger))


@lru_cache(maxsize=64)
def count_owned(num_microbatches: int, world_size: int, num_slots: int | None = None) -> tuple[int, ...]:
    """Return the number of microbatches that `owned_microbatches` assigns to each rank."""
    return tuple(
        len(owned_microbatches(num_microbatches, world_size, rank, num_slots)) for rank in range(world_size)
    )
