"""Computes a cheap hash of a data set's content, so that no run resumes with other data of the same
length."""

from __future__ import annotations

import hashlib

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.contents import add_content
from paceline.data.fetching import Fetcher, SetFetcher
from paceline.data.workers import prepare_worker
from paceline.generators import preserved_generators

# Number of samples that are read, spread evenly over the data. More would detect smaller changes and take
# longer.
NUM_SAMPLES = 8


def fingerprint_data(fetcher: Fetcher, num_workers: int) -> str | None:
    """Return a hash of the content of a data set; equal in every process that reads the same data.

    A data set with a `content_hash` supplies it itself. From any other data set with an index, `NUM_SAMPLES`
    samples are read with the random numbers of epoch 0, each twice, to find data that differ from read to
    read (random numbers of their own).

    Args:
        fetcher: reads the data set's samples.
        num_workers: of the loader. If it has any, the samples are read in a worker process, because files
            that a data set opens must not be shared with workers.

    Returns:
        `None` for streams, for data that differ from read to read, and where a sample cannot be read:
        training reports that with all details.
    """
    if not isinstance(fetcher, SetFetcher):
        return None
    own = getattr(fetcher.dataset, "content_hash", None)
    if isinstance(own, str):
        return own
    digest = _Digest(fetcher)
    try:
        if not num_workers:
            with preserved_generators():
                return digest[0]
        worker = DataLoader(
            digest,
            batch_size=None,
            num_workers=1,
            worker_init_fn=prepare_worker,
            generator=torch.Generator(),  # Otherwise it draws from the rank's own generator.
        )
        found: str | None = next(iter(worker))
        return found
    except Exception:
        return None
    finally:
        fetcher.known_epoch = None


class _Digest(Dataset[str | None]):
    """The hash as a data set of one sample, so that torch's workers can compute it."""

    def __init__(self, fetcher: SetFetcher) -> None:
        self.fetcher = fetcher

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> str | None:
        found = self._compute()
        return found if self._compute() == found else None

    def _compute(self) -> str:
        num_samples = self.fetcher.num_samples
        count = min(NUM_SAMPLES, num_samples)
        places = [place * (num_samples - 1) // max(1, count - 1) for place in range(count)]
        self.fetcher.pass_epoch(0)
        found = hashlib.sha256(f"{num_samples} {places}".encode())
        for sample in self.fetcher.read(places, epoch=0, place=0):
            add_content(found, sample)
        return found.hexdigest()[:32]
