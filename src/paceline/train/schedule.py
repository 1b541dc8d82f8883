"""Computes learning rates by step number, as factors of the peak rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline.recipe.explain import validate_section
from paceline.recipe.schema import ScheduleFields
from paceline.signatures import explain_arguments
from paceline.train.building import check_numbers


def build_schedule(section: ScheduleFields, num_steps: int) -> Callable[[int], float]:
    """Return a function from step number 0, 1, ... to the factor, for a run of `num_steps`.

    The factor rises linearly over `warmup_steps`. The first step already has 1/warmup_steps, so that no step
    is wasted on a rate of zero. The factor is then constant, or falls linearly or along a half cosine to
    `min_lr_ratio` at the last step, and stays there.
    """
    warmup, floor, kind = section.warmup_steps, section.min_lr_ratio, section.schedule

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if kind == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, num_steps - 1 - warmup))
        fall = 1 - done if kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return floor + (1 - floor) * fall

    return factor


def scale_lr(section: ScheduleFields, lr: float, global_batch_size: int) -> float:
    """Return the peak rate by linear scaling (Goyal et al. 2017, https://arxiv.org/abs/1706.02677)."""
    if section.lr_scaling == "linear":
        assert section.base_batch_size is not None
        return lr * global_batch_size / section.base_batch_size
    return lr


class _Schedule(LambdaLR):
    """A schedule whose definition is part of its state, so that a resumed run with another one is refused."""

    def __init__(
        self, optimizer: Optimizer, section: ScheduleFields, num_steps: int, lr_scale: float
    ) -> None:
        self.kind, self.num_steps, self.lr_scale = section.schedule, num_steps, lr_scale
        self.warmup_steps, self.min_lr_ratio = section.warmup_steps, section.min_lr_ratio
        factor = build_schedule(section, num_steps)
        super().__init__(optimizer, lambda step: lr_scale * factor(step))


@explain_arguments
def schedule(
    kind: Literal["constant", "linear", "cosine"] = "cosine",
    *,
    num_steps: int,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.1,
    lr_scale: float = 1.0,
) -> Callable[[Optimizer], LambdaLR]:
    """Return a function from an optimizer to a schedule, that of recipes, for `Trainer(schedule=)`.

        paceline.schedule("cosine", num_steps=3 * len(data) // 64, warmup_steps=100, lr_scale=64 / 256)

    In a loop of your own: `scheduler = paceline.schedule(...)(optimizer)`, stepped once per optimizer step.

    Args:
        kind: of the rate after the warm-up: constant, or falling to `min_lr_ratio` at the last step.
        num_steps: optimizer steps of the whole run; their number does not depend on the ranks.
        warmup_steps: over which the rate rises linearly.
        min_lr_ratio: rate at the last step, as a share of the optimizer's.
        lr_scale: factor of all rates. For linear scaling, the global batch divided by the one for which the
            optimizer's rate was chosen (Goyal et al. 2017).
    """
    check_numbers(num_steps=(num_steps, 1), lr_scale=(lr_scale, 0))
    fields = {"schedule": kind, "warmup_steps": warmup_steps, "min_lr_ratio": min_lr_ratio}
    section = validate_section("schedule", ScheduleFields, fields)
    return lambda optimizer: _Schedule(optimizer, section, num_steps, lr_scale)
