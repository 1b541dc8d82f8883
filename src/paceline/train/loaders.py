"""A trainer's loaders, which measure the wait for data and end the loop when a rank was asked to stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

from paceline.data.loader import Loader
from paceline.data.share import Share
from paceline.train.compressing import check_num_slots


class StepTaker(Protocol):
    """The methods of a trainer that its loaders call.

    Attributes:
        num_slots: of the compression; `None` without.
    """

    num_slots: int | None

    def leave_if_asked(self) -> None:
        """Save and leave if some rank was asked to stop."""

    def add_data_wait(self, seconds: float) -> None:
        """Count time that the loop waited for data."""


class TrainerLoader(Loader):
    """A loader whose iteration belongs to a trainer's steps.

    Args:
        trainer: the trainer that made the loader.
        dataset, settings: as for `Loader`.
    """

    def __init__(self, trainer: StepTaker, dataset: Any, **settings: Any) -> None:
        super().__init__(dataset, num_slots=trainer.num_slots, **settings)
        if settings.get("shuffle") is not False:
            check_num_slots(trainer.num_slots, self.global_batch_size, self.microbatch_size)
        self._trainer = trainer

    def __iter__(self) -> Iterator[Share]:
        shares = super().__iter__()
        while True:
            self._trainer.leave_if_asked()
            started_s = time.perf_counter()
            share = next(shares, None)
            self._trainer.add_data_wait(time.perf_counter() - started_s)
            if share is None:
                return
            yield share
