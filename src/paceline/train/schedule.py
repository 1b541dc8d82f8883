"""Computes learning rates by step number, as factors of the peak rate."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.recipe.schema import ScheduleFields


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
