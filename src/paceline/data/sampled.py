"""Takes the order of samples from a torch sampler or batch sampler, in place of a loader's own order."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils.data import Dataset

from paceline.data.fetching import seed_generators
from paceline.errors import PacelineError
from paceline.generators import preserved_generators


class Sampled(Dataset[Any]):
    """A data set in the order of a torch sampler or batch sampler, drawn once per epoch under the seed.

    Args:
        dataset: the samples.
        sampler: yields their indices, or lists of them if `is_cut`.
        is_cut: whether each list is a global batch.

    Attributes:
        num_samples, num_batches: of the first epoch; `None` batches if the loader cuts them.
        largest: samples of its largest batch.
    """

    def __init__(self, dataset: Any, sampler: Any, seed: int, *, is_cut: bool) -> None:
        self.dataset, self.sampler = dataset, sampler
        self._seed, self._is_cut = seed, is_cut
        self._batches: list[list[Any]] = []
        self._order: list[Any] = []
        self.set_epoch(0)
        self.num_samples, first = len(self._order), self._batches
        self.num_batches = len(first) if is_cut else None
        self.largest = max(map(len, first), default=0)
        self.set_epoch(0)
        if self._batches != first:
            raise loader_error(
                f"the sampler {type(sampler).__name__}, which gives another order each time that it is asked "
                "for the same epoch.",
                "Every rank and every resumed run draws the order of an epoch itself, under the seed.",
                "Draw from torch's, numpy's or Python's global generators, or derive the order from the "
                "epoch that set_epoch(epoch) gets.",
            )

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of an epoch."""
        parts = [self.sampler, *(getattr(self.sampler, name, None) for name in ("sampler", "batch_sampler"))]
        with preserved_generators():
            seed_generators(self._seed, epoch, "sampler", 0)
            for part in parts:
                if isinstance(own := getattr(part, "generator", None), torch.Generator):
                    own.manual_seed(torch.initial_seed())  # else it would depend on the epochs drawn here
                if callable(set_epoch := getattr(part, "set_epoch", None)):
                    set_epoch(epoch)
            drawn = [each if self._is_cut else [each] for each in self.sampler]
        batches = [[int(i) if hasattr(i, "__index__") else i for i in batch] for batch in drawn]
        self._batches = [batch for batch in batches if batch]
        self._order = [index for batch in self._batches for index in batch]

    def list_stops(self, epoch: int) -> list[int] | None:
        """Return the places after the global batches of an epoch, if the sampler cuts it."""
        self.set_epoch(epoch)
        if len(self._order) != self.num_samples:
            raise loader_error(
                f"the sampler {type(self.sampler).__name__}, which gives {len(self._order)} samples in epoch "
                f"{epoch}, and gave {self.num_samples} in epoch 0.",
                "Every epoch has the same number of samples, so that a position means the same in all.",
                "Give all samples in every epoch, or as many.",
            )
        return list(itertools.accumulate(map(len, self._batches))) if self._is_cut else None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, place: int) -> Any:
        return self.dataset[self._order[place]]


def loader_error(saw: str, rule: str, fix: str) -> PacelineError:
    """Return PL648, for a torch `DataLoader` that cannot be taken over."""
    return PacelineError("PL648", saw=saw, rule=rule, fix=fix)
