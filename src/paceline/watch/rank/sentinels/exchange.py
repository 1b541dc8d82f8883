"""Counts the bytes that ranks have exchanged since the first step, once the script has ended."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from paceline.torch_seams.flight import read_entries
from paceline.torch_seams.observing import read_default_group
from paceline.torch_seams.watching import BUFFER_SIZES
from paceline.watch.rank.sentinels.numbers import Sample
from paceline.watch.rank.sentinels.outbox import Outbox
from paceline.watch.rank.threads import Mark

_LARGEST_ITEM = 8


class ExchangedBytes:
    """What was exchanged while the models of this rank were trained.

    Args:
        count_transfers: returns the number of sends and receives so far.
    """

    def __init__(self, outbox: Outbox, count_transfers: Callable[[], int]) -> None:
        self._outbox = outbox
        self._count_transfers = count_transfers
        self._began_ns = 0
        self._ranks: tuple[int, ...] = ()
        self._weights: Sample | None = None
        self._passes = 0
        self._marks: tuple[Mark, ...] = ()
        self._model_bytes = 0

    def note_look(
        self, passes: int, weights: Sample, parameters: Iterable[Any], marks: tuple[Mark, ...]
    ) -> None:
        """Take the weights of a model that is being trained."""
        if not self._began_ns:
            group = read_default_group()
            self._ranks = () if group is None else group[1]
            self._began_ns = time.time_ns()
        self._weights, self._passes, self._marks = weights, passes, marks
        self._model_bytes = sum(one.numel() * one.element_size() for one in parameters)

    def end(self, *, is_split: bool, saved: set[str]) -> None:
        """Send what was exchanged.

        Args:
            is_split: whether the ranks' work is one training: a sampler has split the samples, or DDP wraps
                the model.
            saved: the files that this rank has written.
        """
        if (
            len(self._ranks) < 2
            or self._weights is None
            or any(os.environ.get(v) == "0" for v in BUFFER_SIZES)
        ):
            return
        entries = read_entries(has_frames=False)
        if self._count_transfers() or (
            entries and entries[0].record and entries[0].created_ns > self._began_ns
        ):
            return  # The recorder has kept only the latest.
        num_bytes = sum(
            _LARGEST_ITEM * math.prod(size)
            for entry in entries
            if entry.created_ns > self._began_ns
            for size in entry.raw.get("input_sizes", ())
        )
        values = {
            "weights": self._weights,
            "at": self._passes,
            "bytes": num_bytes,
            "model_bytes": self._model_bytes,
            "is_split": is_split,
            "saved": sorted(saved),
        }
        self._outbox.put("end", "", self._ranks, self._passes, self._marks, values)
