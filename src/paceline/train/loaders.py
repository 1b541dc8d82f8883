"""A trainer's loaders, which measure the wait for data and end the loop when a rank was asked to stop."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from paceline.data.fetching import Key
from paceline.data.loader import Loader
from paceline.data.oversized import warn_of_oversized_batch
from paceline.data.share import Share, split_microbatches
from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.torch_seams.trees import learn_mapping
from paceline.train.batches import RankRows
from paceline.train.compressing import check_num_slots
from paceline.train.same_settings import all_ranks, check_same_settings, describe_data

if TYPE_CHECKING:
    from paceline.train.training import Training

log = logging.getLogger(__name__)


# What the user's loop gets per global batch.
Handed = TypeVar("Handed")


class TrainerLoader(Loader, Generic[Handed]):
    """A loader whose iteration belongs to a trainer's steps.

    Args:
        dataset, settings: as for `Loader`.
        shard: `"loader"` for the whole data, `"mine"` for this rank's own part.
        dp: the ranks that have different samples; `None` in a world of one.
        pin_memory: `None`: if the ranks are on GPUs.
        others: the trainer's loaders by name. A loader of data that another one has trained on starts with
            the next epoch, so that a loader made in every epoch does not repeat the order of the first.

    Attributes:
        is_compared: whether the settings of the loader were compared over the ranks.
    """

    def __init__(
        self,
        trainer: Training[Handed],
        dataset: Any,
        *,
        shard: Literal["loader", "mine"] = "loader",
        dp: Axis | None,
        pin_memory: bool | None = None,
        others: Mapping[str, Loader],
        **settings: Any,
    ) -> None:
        world = trainer.world
        super().__init__(
            dataset,
            num_slots=trainer.num_slots,
            turns=trainer.turns,
            rank=0 if dp is None else dp.rank,
            world_size=1 if dp is None else dp.size,
            pin_memory=world.device.type == "cuda" if pin_memory is None else pin_memory,
            compares=dp is not None,
            exchange=RankRows(dp, world.host).exchange if shard == "mine" else None,
            **settings,
        )
        self.is_compared, self._others = False, others
        if settings.get("shuffle") is not False:
            if world.is_main:
                warn_of_oversized_batch(self)
                size, most = self.global_batch_size, self.microbatch_size
                log.info(
                    "global batch %d = %d microbatches of up to %d on %d ranks",
                    *(size, -(-size // most), most, world.world_size),
                )
            check_num_slots(trainer.num_slots, self.global_batch_size, self.microbatch_size)
        self._trainer = trainer

    def check_same(self) -> None:
        """Compare the settings and the data over the ranks, the first time; collective."""
        if not self.is_compared:
            check_same_settings(describe_data(self), all_ranks())
            self.is_compared = True

    def take_whole(self, place: int, rank: int, *, reads: bool) -> Share:
        """Return a global batch as the share of one rank that computes all of it; the position stays.

        Only for data sets with an index, which the loader itself cuts into batches.

        Args:
            place: of the batch, counted over epochs.
            rank: the one that computes it.
            reads: whether to read its samples; without them, `microbatches` is empty.
        """
        assert self.num_samples is not None
        epoch, number = divmod(place, len(self))
        start = number * self.global_batch_size
        key = Key(epoch, number, start, min(start + self.global_batch_size, self.num_samples), False)
        cuts = split_microbatches(key.stop - start, self.microbatch_size)
        num_owned = tuple(len(cuts) * (each == rank) for each in range(self._world_size))
        found = Share(epoch, number, key.stop - start, num_owned, [], start=start, source=self)
        found.last = number + 1 == len(self)
        if reads:
            fetcher = copy.copy(self._fetcher)
            fetcher.rank, fetcher.world_size, fetcher.num_slots, fetcher.turns = 0, 1, None, 1
            item = fetcher[key]
            if isinstance(item, PacelineError):
                raise item
            found.microbatches, found.samples = item.microbatches, [range(*cut) for cut in cuts]
        return found

    @property
    def place(self) -> int:
        """The number of the next global batch, counted over epochs."""
        return self._position.epoch * len(self) + self._position.number

    def count_left(self, num_batches: int) -> int:
        """Return how many of the next `num_batches` global batches there are, as far as `epochs` goes."""
        last = self._last_epoch
        return num_batches if last is None else max(0, min(num_batches, last * len(self) - self.place))

    def __iter__(self) -> Iterator[Handed]:  # type: ignore[override]
        self.begin_with(self._find_next_epoch())
        if self.is_complete and not self._has_begun and self._trainer.world.is_main:
            log.warning(
                "the resumed run is complete: no step of its %d epochs is left. A larger epochs= continues "
                "it, another folder starts a new run",
                self.epochs,
            )
        shares = super().__iter__()
        while True:
            self._trainer.leave()
            started_s = time.perf_counter()
            share = next(shares, None)
            self._trainer.add_data_wait(time.perf_counter() - started_s)
            if share is None:
                return
            for _, batch in share.microbatches:
                learn_mapping(batch)
            yield self._trainer.open(share)

    def _find_next_epoch(self) -> int:
        """Return the first epoch that no other loader over the same data has begun."""
        moved = [other for other in self._others.values() if other is not self and other.has_moved]
        same = [other for other in moved if other.dataset is self.dataset or self._has_content_of(other)]
        return max((other.epoch + (other.position.samples > 0) for other in same), default=0)

    def _has_content_of(self, other: Loader) -> bool:
        """Return whether the data are those of another loader, made anew, as in a loop over epochs."""
        if type(self.dataset) is not type(other.dataset) or self.num_samples != other.num_samples:
            return False
        return self.content_hash is not None and self.content_hash == other.content_hash
