"""The input of a runner: the microbatches of one update, the start of the agreement, and the rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paceline.data.share import Share
from paceline.parallel.objective import Loss
from paceline.train.agreement import Agreement, RankMessage
from paceline.train.same_settings import StepSettings


@dataclass
class Launch:
    """The start of the agreement, which a runner calls in the last microbatch.

    Attributes:
        agreement, message: what is sent.
        settings: the settings that ranks compare.
        used: by trained parameter, whether this rank has used it; `None` if that is not tracked.
        is_done: whether it has started.
    """

    agreement: Agreement
    message: RankMessage
    settings: StepSettings
    used: list[bool] | None
    is_done: bool = False

    def now(self, *, leaves_out: bool = False) -> None:
        if self.used is not None:
            self.agreement.put_used(self.used)
        self.agreement.launch(replace(self.message, leaves_out=leaves_out))
        self.is_done = True


@dataclass(frozen=True)
class OwnLoop:
    """What a loop with a backward of its own adds to the work.

    Attributes:
        weigh: from a microbatch on the device to the weight of its mean loss.
        left_out: parameters whose gradients this update does not want.
        keeps_nonfinite: whether gradients that are not finite stay.
    """

    weigh: Callable[[Any], float]
    left_out: Sequence[Tensor] = ()
    keeps_nonfinite: bool = False


@dataclass(frozen=True)
class Work:
    """The input that the microbatches of one update share.

    Attributes:
        objective: forward and loss; `None` if the user's own code computes them.
        step: number of the optimizer step, from 1.
        phase: number of the update within the step.
        unit: the power of two by which losses are divided.
        launch: starts the agreement.
        count_flops: whether to count the floating-point operations of the first microbatch.
        own: what a loop of the user's own adds.
        num_means: of the user's values, each with its weight, which the agreement carries per microbatch.
    """

    objective: Loss | None
    share: Share
    step: int
    phase: int
    unit: float
    launch: Launch
    count_flops: bool = False
    own: OwnLoop | None = None
    num_means: int = 0

    @property
    def adds_late(self) -> bool:
        """Whether a loop of the user's own may add values after its backward, which the agreement awaits."""
        return self.own is not None and self.num_means > 0


# Replaces a microbatch's number if a rank runs one only because the others do.
IDLE = -1


@dataclass
class Round:
    """A microbatch that the caller of `Runner.rounds` runs before it asks for the next one.

    Attributes:
        index: its number within the global batch; `IDLE` for a borrowed one, whose gradients do not count.
        batch: on the device.
        is_last: whether it is the last one of this rank in this update.
        loss_sum, weight: reported to all ranks; the caller sets them before the backward.
        is_reported: whether they are in the agreement.
        is_reduced: whether a backward has summed the gradients over ranks.
        scale: in a loop of the user's own, the factor of its gradients that the runner applies.
        num_backwards: of such a loop's backwards, as far as they are seen.
        is_explicit: whether such a loop has called `step.backward`.
        means: of the user's values, each weighted sum and its weight.
    """

    index: int
    batch: Any
    is_last: bool
    loss_sum: Tensor | None = None
    weight: Tensor | None = None
    is_reported: bool = False
    is_reduced: bool = False
    scale: float = 1.0
    num_backwards: int = 0
    is_explicit: bool = False
    means: Tensor | None = None
