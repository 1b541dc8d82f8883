"""Checks for mistakes with data that would train, but not as the user intended."""

from __future__ import annotations

import logging

from paceline.data.loader import Loader
from paceline.finding import Finding

log = logging.getLogger(__name__)


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
