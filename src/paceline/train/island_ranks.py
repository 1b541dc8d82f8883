"""Places islands on ranks, and checks them against the layout and the other arguments of a trainer.

Ranks along `dp_replicate` are cut into equal blocks: as many as there are islands, or as there are ranks if
these are fewer. A block is laid out like a world of its own. It has one island, or several in turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.data.share import Share, count_owned
from paceline.errors import PacelineError
from paceline.recipe import Layout
from paceline.recipe.islands import IslandsSection

if TYPE_CHECKING:
    from paceline.train.arguments import Arguments

_INSIDE = ("dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class IslandRanks:
    """The islands of a run on its ranks.

    Attributes:
        block: that of this rank.
    """

    section: IslandsSection
    layout: Layout
    num_blocks: int
    block: int

    @property
    def own(self) -> range:
        """The islands of this rank's block."""
        per_block = self.section.count // self.num_blocks
        return range(self.block * per_block, (self.block + 1) * per_block)

    def cut(self, share: Share) -> list[Share]:
        """Return this rank's microbatches of each own island; microbatches are numbered within an island."""
        count, num_microbatches = self.section.count, share.num_microbatches
        if error := share_error(count, num_microbatches):
            error.on_every_rank = True
            raise error
        size, found = num_microbatches // count, []
        for island in self.own:
            block = range(island * size, (island + 1) * size)
            places = [n for n, (number, _) in enumerate(share.microbatches) if number in block]
            part = replace(
                share,
                num_samples=share.num_samples // count,
                num_owned=count_owned(size, self.layout.dp),
                microbatches=[
                    (share.microbatches[n][0] - block.start, share.microbatches[n][1]) for n in places
                ],
                samples=[share.samples[n] for n in places],
            )
            found.append(part)
        return found

    def check_batches(
        self, dataset: Any, global_batch_size: int, microbatch_size: int, *, is_whole: bool
    ) -> None:
        """Raise PL672 for batches of a loader that islands cannot share equally.

        Args:
            global_batch_size, microbatch_size: in samples.
            is_whole: whether the last batch of an epoch counts, which may be smaller.
        """
        rest = len(dataset) % global_batch_size if is_whole and hasattr(dataset, "__len__") else 0
        for num_samples in (global_batch_size, rest or global_batch_size):
            if error := share_error(self.section.count, -(-num_samples // microbatch_size)):
                raise error

    def within(self, share: Share) -> Share:
        """Return a share of samples to evaluate as one of this rank's block."""
        dp = self.layout.dp
        return replace(share, num_owned=share.num_owned[self.block * dp : (self.block + 1) * dp])


def place_islands(given: Arguments, layout: Layout, rank: int) -> IslandRanks | None:
    """Return the islands of a trainer; `None` for one, which is plain training.

    Args:
        layout: resolved.
    """
    section = given.islands_section
    count = section.count
    if count == 1:
        return None
    _refuse_arguments(given, count)
    others = [axis for axis in layout.list_several() if axis not in _INSIDE]
    if others:
        raise PacelineError(
            "PL670",
            saw=f"islands.count={count} with layout {layout}.",
            rule=f"Ranks of an island share its work by {', '.join(_INSIDE)}.",
            fix=f"Set {', '.join(f'{axis}=1' for axis in others)}, or islands.count to 1.",
        )
    degree = layout.degrees["dp_replicate"]
    if degree % count and (count % degree or layout.dp_shard > 1):
        turns = "" if layout.dp_shard > 1 else f", or a divisor of {count}: islands then take turns on a rank"
        raise PacelineError(
            "PL670",
            saw=f"islands.count={count} with layout {layout}.",
            rule="Islands lie along dp_replicate, and all of them have the same number of ranks.",
            fix=f"Set dp_replicate to {count} or a multiple of it{turns}.",
        )
    if section.codec != "none" and layout.tp > 1:
        raise PacelineError(
            "PL670",
            saw=f"islands.codec={section.codec!r} with layout {layout}.",
            rule="A codec encodes whole rows, and tp divides them.",
            fix='Set islands.codec to "none", or tp to 1.',
        )
    num_blocks = min(count, degree)
    inner = replace(layout, dp_replicate=degree // num_blocks)
    return IslandRanks(section, inner, num_blocks, rank // inner.num_ranks)


def share_error(count: int, num_microbatches: int) -> PacelineError | None:
    """Return PL672 for a global batch that islands cannot share equally."""
    if num_microbatches and num_microbatches % count == 0:
        return None
    return PacelineError(
        "PL672",
        saw=f"islands.count={count}, and a global batch of {num_microbatches} microbatches.",
        rule="Every island trains on the same number of microbatches of every global batch, at least one.",
        fix="Change the microbatch size or the global batch size. If only the last batch of an epoch is "
        "smaller, pass drop_last=True to the loader.",
    )


def refuse_own_batch(islands: object) -> None:
    """Raise PL672 for batches that ranks bring themselves."""
    if islands is not None:
        raise PacelineError(
            "PL672",
            saw="islands with samples that each rank brings itself.",
            rule="An island's samples do not depend on the number of ranks, so a loader distributes them.",
            fix="Use a loader over the whole data, or loop.split with a batch that all ranks have.",
        )


def _refuse_arguments(given: Arguments, count: int) -> None:
    several = isinstance(given.model, Mapping)
    for name, is_there, reason in (
        ("several models", several, "An island has one model and one optimizer."),
        ("compress", given.has_compression, "islands.codec encodes what islands exchange."),
        ("ema", bool(given.ema), "Global weights change only when islands exchange."),
        ('loss_over="global_batch"', given.loss_over == "global_batch", "No island has the whole batch."),
        ('checkpoint_mode="sharded"', given.checkpoint_mode == "sharded", "Rank 0 writes all islands."),
        ("asynchronous_saves", given.asynchronous_saves, "A save gathers all islands, and training waits."),
    ):
        if is_there:
            raise PacelineError(
                "PL671",
                saw=f"islands.count={count} with {name}.",
                rule=reason,
                fix=f"Leave {name.split('=')[0]} out, or set islands.count to 1.",
            )
