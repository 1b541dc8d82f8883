"""Takes over a torch `DataLoader`, for a trainer or a loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from paceline.data.loader import Loader
from paceline.data.sampled import Sampled, loader_error

log = logging.getLogger(__name__)


def open_loader(
    data: Any, given: Mapping[str, Any], seed: int, *, is_own: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the data and the settings of a Paceline loader.

    Args:
        data: a torch `DataLoader`, or a data set.
        given: settings that count more than those of the `DataLoader`.
        is_own: whether the data are this rank's own part.
    """
    data, taken = _open(data, seed)
    if isinstance(data, Sampled) and data.num_batches is not None:
        others = [key for key in ("global_batch_size", "shuffle", "drop_last") if key in given]
        if is_own or others:
            raise loader_error(
                f"a DataLoader with a batch sampler, and {(*others, 'shard')[0]}=.",
                "Each list that the batch sampler gives is a global batch of the whole data.",
                "Leave it out, or pass the DataLoader's data set.",
            )
    settings = taken | dict(given)
    if "global_batch_size" not in settings:
        raise loader_error(
            f"loader({type(data).__name__}) without global_batch_size.",
            "A step has a fixed number of samples over all ranks.",
            "Pass global_batch_size=64, or DataLoader(data, batch_size=64).",
        )
    return data, settings


def _open(data: Any, seed: int) -> tuple[Any, dict[str, Any]]:
    if isinstance(data, Loader):
        raise loader_error("a loader of Paceline.", "A loader is made of data.", "Pass the data set.")
    if not isinstance(data, DataLoader):
        return data, {}
    sampler: Any = data.sampler
    batches: Any = data.batch_sampler
    dataset: Any = data.dataset
    if isinstance(sampler, DistributedSampler) or isinstance(
        getattr(batches, "sampler", None), DistributedSampler
    ):
        raise loader_error(
            "a DataLoader with a DistributedSampler.",
            "Paceline deals the samples out itself, so each rank would get a part of a part.",
            "Build the DataLoader without it, with shuffle=True and the batch size of all ranks together.",
        )
    if batches is None:
        raise loader_error(
            "a DataLoader with batch_size=None.",
            "A global batch is cut into microbatches of samples.",
            "Pass a data set of samples and batch_size=, or a batch sampler.",
        )
    if data.worker_init_fn is not None:
        log.warning("the DataLoader's worker_init_fn is not called: random numbers are seeded per sample")
    taken: dict[str, Any] = {"num_workers": data.num_workers}
    if data.collate_fn is not default_collate:
        taken["collate"] = data.collate_fn
    if data.num_workers and data.prefetch_factor:
        taken["prefetch"] = data.prefetch_factor
    if isinstance(dataset, IterableDataset):
        return dataset, taken | {"global_batch_size": data.batch_size, "drop_last": data.drop_last}
    is_cut = type(batches) is not BatchSampler
    if not is_cut:  # also one that the user has built, with the data set's own sampler
        sampler = batches.sampler
        taken |= {"global_batch_size": batches.batch_size, "drop_last": batches.drop_last}
    is_random = type(sampler) is RandomSampler and not sampler.replacement
    is_plain = is_random or type(sampler) is SequentialSampler
    if is_plain and not is_cut and len(sampler) == len(dataset):
        return dataset, taken | {"shuffle": is_random}
    source = batches if is_cut else sampler
    if not hasattr(source, "__len__"):
        raise loader_error(
            f"a DataLoader with {'batch_' * is_cut}sampler={type(source).__name__}, which has no length.",
            "An epoch ends, and has a known number of samples.",
            "Give the sampler a __len__.",
        )
    sampled = Sampled(dataset, source, seed, is_cut=is_cut)
    return sampled, taken | {"shuffle": False} | ({"global_batch_size": sampled.largest} if is_cut else {})
