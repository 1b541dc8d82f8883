"""Joins data that each rank has a part of already into global batches (`shard="mine"`).

Each rank draws its part of a global batch from its own data, as many samples as of whole data. In one small
collective per global batch, ranks exchange how many samples they have left to give. A rank whose data have
ended gives none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from paceline.data.contents import are_alike, join_digests
from paceline.data.fetching import Item
from paceline.data.share import Share, owned_microbatches, split_microbatches
from paceline.errors import PacelineError

Exchange = Callable[[Sequence[int]], Sequence[Sequence[int]]]
"""Returns the row of numbers of each data rank: samples, microbatches, whether these are its last; and
last whether samples are alike, and their digest."""


def count_own_samples(
    global_batch_size: int, microbatch_size: int, world_size: int, *, rank: int, num_slots: int | None
) -> int:
    """Return the number of samples that a rank draws from its own data for a full global batch."""
    cuts = split_microbatches(global_batch_size, microbatch_size)
    if len(cuts) < world_size or num_slots is not None:
        saw = f"{len(cuts)} microbatches of {microbatch_size} for {world_size} data ranks"
        raise PacelineError(
            "PL108",
            saw=f'shard="mine" with {saw if num_slots is None else "compressed gradients"}.',
            rule="Every rank draws at least one microbatch of each global batch from its own data, and slots "
            "of compressed gradients would need the same number each time.",
            fix=f"Set microbatch_size to {max(1, global_batch_size // world_size)} or less, with a "
            f"global_batch_size of at least {world_size}, and leave compression out.",
        )
    own = owned_microbatches(len(cuts), world_size, rank)
    return cuts[own[-1]][1] - cuts[own[0]][0]


def join_own(
    items: Iterator[Item],
    start: Share,
    rank: int,
    microbatch_size: int,
    drop_last: bool,
    exchange: Exchange,
) -> Iterator[Share]:
    """Yield the global batches of an epoch; collective.

    Args:
        start: a share without samples, at the place of the first global batch.
        microbatch_size: samples per microbatch.
        drop_last: end the epoch at the first global batch that some rank cannot fill.
        exchange: gathers the ranks' numbers.
    """
    by_rank, number, place = start.by_rank, start.number, start.start
    while True:
        item, row = next(items, None), [0, 0, 1, 1, 0]
        if item is not None:
            row = [item.num_samples, item.num_microbatches, item.last]
            row += [are_alike(item.digests), join_digests(item.digests)]
        sizes, num_owned, lasts, *_ = zip(*exchange(row), strict=True)
        if not any(sizes) or (drop_last and not all(sizes)):
            return
        by_rank = tuple(map(sum, zip(by_rank, sizes, strict=True)))
        first, before = sum(num_owned[:rank]), sum(sizes[:rank])
        cuts = split_microbatches(sizes[rank], microbatch_size)
        yield Share(
            epoch=start.epoch,
            number=number,
            num_samples=sum(sizes),
            num_owned=num_owned,
            microbatches=[(first + n, batch) for n, batch in item.microbatches] if item else [],
            samples=[range(before + begin, before + end) for begin, end in cuts],
            start=place,
            last=(any if drop_last else all)(lasts),
            by_rank=by_rank,
        )
        number, place = number + 1, place + sum(sizes)


def moved_error(name: str, counts: Mapping[str, int | None], num_saved: int, num_ranks: int) -> PacelineError:
    """Return PL669, for a position in the middle of an epoch on another number of data ranks."""
    return PacelineError(
        "PL669",
        saw=f"{name} is {counts['samples']} samples into epoch {counts['epoch']} on {num_saved} data ranks, "
        f"and here are {num_ranks}.",
        rule='With shard="mine" a position counts the samples of each rank\'s own data. Another number of '
        "ranks has other parts, so some samples would be used twice or never.",
        fix=f"Resume on {num_saved} data ranks (dp_replicate x dp_shard), or from a checkpoint at the end of "
        "an epoch. For any number of ranks, give every rank the whole data and leave shard= out.",
    )
