"""The result of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.train.update import Updated


class SaveTimes(NamedTuple):
    """The times of saves since the step before.

    Attributes:
        stall_s: seconds that saves have stalled training; `None` if there was none.
        save_s: seconds from the begin to the commit of the last save that has ended.
    """

    stall_s: float | None = None
    save_s: float | None = None


@dataclass(frozen=True)
class Step:
    """The result of `Trainer.step`; everything except times is the same on every rank and layout.

    Attributes:
        number: of the step, from 1; continues over resumes.
        epoch: of the global batch.
        num_samples: of the global batch, over all ranks.
        lr: learning rate used, of the first optimizer's first parameter group.
        updates: by model name, the result of its (last) update in this step.
        step_s: seconds from the end of the previous step to the end of this one, on this rank.
        data_s: seconds of these that this rank waited for its data.
        comm_s: seconds of these that this rank waited for other ranks and for transfers (CPU only); without
            the communication of tp inside a forward or backward.
        metrics: by name, the means of `Trainer(metrics=)` over the global batch, before the update.
    """

    number: int
    epoch: int
    num_samples: int
    lr: float
    updates: dict[str, Updated]
    step_s: float
    data_s: float
    comm_s: float
    metrics: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        text = (
            f"step {self.number}: loss {self.loss:.6g}, gradient norm {self.grad_norm:.4g}, lr {self.lr:.3g}"
        )
        text += "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        return f"{text}, skipped: {self.skipped}" if self.skipped else text

    __repr__ = __str__

    @property
    def loss(self) -> float:
        """Mean loss over the global batch, before the update (of the first model if there are several)."""
        return self._first.loss

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping (of the first model if there are several)."""
        return self._first.grad_norm

    @property
    def skipped(self) -> str | None:
        """The reason why some model's weights were left unchanged, or `None`."""
        return next((update.skipped for update in self.updates.values() if update.skipped), None)

    @property
    def fullest_expert(self) -> float | None:
        """The fullest expert's share of the choices in the global batch, a mean over the mixtures.

        It is `None` without mixtures of `paceline.models.moe`, and in skipped steps.
        """
        return self._first.fullest_expert

    @property
    def _first(self) -> Updated:
        return next(iter(self.updates.values()))
