"""Checks for mistakes with data that would train, but not as the user intended."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.loader import Loader
from paceline.errors import PacelineError
from paceline.finding import Finding

log = logging.getLogger(__name__)


def check_data(dataset: Any, name: str) -> None:
    """Raise PL210 for a loader in place of a data set.

    Args:
        dataset: what a loader is to be made of.
        name: of the loader.
    """
    if isinstance(dataset, (DataLoader, Loader)):
        raise PacelineError(
            "PL210",
            saw=f"a {type(dataset).__name__} was passed as the data of {name}.",
            rule="The trainer makes batches itself, because their order, the microbatches and each rank's "
            "share must not depend on the number of ranks. With a loader, each batch would count as one "
            "sample.",
            fix="Pass the data set: trainer.loader(dataset, global_batch_size=64, collate=..., "
            "num_workers=...). "
            "Or pass each batch of your loader to trainer.step(batch), with other samples on every rank.",
        )


def warn_of_oversized_batch(loader: Loader) -> None:
    """Log PL212 if an epoch has fewer samples than one global batch."""
    num_samples, size = loader.num_samples, loader.global_batch_size
    if num_samples is None or num_samples >= size:
        return
    finding = Finding(
        "PL212",
        loader.name,
        f"global_batch_size={size}, but the data has {num_samples} samples.",
        f"Every global batch is then the whole data of {num_samples} samples.",
        f"Set global_batch_size to {num_samples} or less, or check that all data was found.",
    )
    log.warning("%s", finding)
