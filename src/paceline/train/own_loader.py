"""Takes over a torch `DataLoader`, and yields the steps of a loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from paceline.data.fetching import seed_generators
from paceline.data.loader import Loader
from paceline.errors import PacelineError
from paceline.generators import preserved_generators
from paceline.train.loaders import TrainerLoader
from paceline.train.own_step import LoopStep

if TYPE_CHECKING:
    from paceline.train.loop import Loop

log = logging.getLogger(__name__)


class LoopLoader:
    """An iterable over a loop's steps, one per global batch.

    Attributes:
        inner: the loader of the shares; its position is saved in the checkpoints.
    """

    def __init__(self, loop: Loop, inner: TrainerLoader) -> None:
        self.inner = inner
        self._loop = loop
        if loop.world.is_main:
            size, most = inner.global_batch_size, inner.microbatch_size
            log.info(
                "global batch %d = %d microbatches of up to %d on %d ranks",
                *(size, -(-size // most), most, loop.world.world_size),
            )

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, from 0."""
        return self.inner.epoch

    def __len__(self) -> int:
        """Return the number of steps in a full epoch; raise a TypeError for streams."""
        return len(self.inner)

    def __iter__(self) -> Iterator[LoopStep]:
        for share in self.inner:
            yield self._loop.open(share)
        self._loop.end_step()


class _Sampled(Dataset[Any]):
    """A data set in the order of a torch sampler, drawn once per epoch under the seed."""

    def __init__(self, dataset: Any, sampler: Any, seed: int) -> None:
        self.dataset, self.sampler = dataset, sampler
        self._seed = seed
        self._order: list[int] = []
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of an epoch."""
        with preserved_generators():
            seed_generators(self._seed, epoch, "sampler", 0)
            if isinstance(own := getattr(self.sampler, "generator", None), torch.Generator):
                own.manual_seed(torch.initial_seed())  # else its state would depend on the epochs drawn here
            if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
                set_epoch(epoch)
            self._order = [int(index) for index in self.sampler]

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, place: int) -> Any:
        return self.dataset[self._order[place]]


def open_loader(data: Any, seed: int) -> tuple[Any, dict[str, Any]]:
    """Return the data of a torch `DataLoader` and the settings for a Paceline one; other data as they are.

    Raises:
        PacelineError: PL648 for one that cannot be taken over.
    """
    if isinstance(data, Loader):
        raise _loader_error("a loader of Paceline.", "A loop makes its own loaders.", "Pass the data set.")
    if not isinstance(data, DataLoader):
        return data, {}
    sampler, batches = data.sampler, data.batch_sampler
    if isinstance(sampler, DistributedSampler) or isinstance(
        getattr(batches, "sampler", None), DistributedSampler
    ):
        raise _loader_error(
            "a DataLoader with a DistributedSampler.",
            "Paceline deals the samples out itself, so each rank would get a part of a part.",
            "Build the DataLoader without it, with shuffle=True and the batch size of all ranks together.",
        )
    if data.batch_size is None or (batches is not None and type(batches) is not BatchSampler):
        kind = "batch_size=None" if batches is None else f"batch_sampler={type(batches).__name__}"
        raise _loader_error(
            f"a DataLoader with {kind}.",
            "Every step has the same number of samples, in an order that is known per sample.",
            "Pass batch_size= and sampler=; to group samples by length, do it in the order of the sampler.",
        )
    if data.worker_init_fn is not None:
        log.warning("the DataLoader's worker_init_fn is not called: random numbers are seeded per sample")
    taken: dict[str, Any] = {
        "global_batch_size": data.batch_size,
        "drop_last": data.drop_last,
        "num_workers": data.num_workers,
    }
    if data.collate_fn is not default_collate:
        taken["collate"] = data.collate_fn
    if data.num_workers and data.prefetch_factor:
        taken["prefetch"] = data.prefetch_factor
    if isinstance(data.dataset, IterableDataset):
        return data.dataset, taken
    is_random = type(sampler) is RandomSampler and not sampler.replacement
    if is_random and len(sampler) == len(data.dataset):  # type: ignore[arg-type]
        return data.dataset, taken | {"shuffle": True}
    if type(sampler) is SequentialSampler:
        return data.dataset, taken | {"shuffle": False}
    if not hasattr(sampler, "__len__"):
        raise _loader_error(
            f"a DataLoader with sampler={type(sampler).__name__}, which has no length.",
            "An epoch has a known number of samples.",
            "Give the sampler a __len__.",
        )
    return _Sampled(data.dataset, sampler, seed), taken | {"shuffle": False}


def _loader_error(saw: str, rule: str, fix: str) -> PacelineError:
    return PacelineError("PL648", saw=saw, rule=rule, fix=fix)
