"""The input of a runner: the microbatches of one update, and the start of the agreement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.data.share import Share
from paceline.parallel.objective import Loss
from paceline.train.agreement import Agreement, RankMessage


@dataclass
class Launch:
    """The start of the agreement, which a runner calls in the last microbatch.

    Attributes:
        agreement, message: what is sent.
        used: by trained parameter, whether this rank has used it; `None` if that is not tracked.
        measure: returns this rank's parts of the gradient's norm, if the agreement carries them. Then the
            gradients must be summed before the start.
        is_done: whether it has started.
    """

    agreement: Agreement
    message: RankMessage
    used: list[bool] | None
    measure: Callable[[], Tensor] | None = None
    is_done: bool = False

    def now(self, *, leaves_out: bool = False, busy_s: float = 0.0, lasted_s: float = 0.0) -> None:
        if self.used is not None:
            self.agreement.put_used(self.used)
        if self.measure is not None:
            self.agreement.put_parts(self.measure())
        message = replace(self.message, leaves_out=leaves_out, busy_s=busy_s, lasted_s=lasted_s)
        self.agreement.launch(message)
        self.is_done = True


@dataclass(frozen=True)
class Work:
    """The input that the microbatches of one update share.

    Attributes:
        objective: forward and loss.
        share: this rank's microbatches.
        step: number of the optimizer step, from 1.
        phase: number of the update within the step.
        unit: the power of two by which losses are divided.
        launch: starts the agreement.
    """

    objective: Loss
    share: Share
    step: int
    phase: int
    unit: float
    launch: Launch
