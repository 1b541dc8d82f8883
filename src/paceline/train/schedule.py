"""Learning rates over time, as factors of the peak rate by step number."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.recipe.schema import ScheduleFields


def build_schedule(section: ScheduleFields, num_steps: int) -> Callable[[int], float]:
    """The factor for step number 0, 1, ... of a run of `num_steps`.

    Rises linearly over `warmup_steps` (the first step already has 1/warmup_steps, so that no step is
    wasted on a rate of zero), then is constant or falls linearly or along a half cosine, reaching
    `min_lr_ratio` at the last step and staying there.
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
    """The peak rate after the linear scaling rule (Goyal et al. 2017, https://arxiv.org/abs/1706.02677)."""
    if section.lr_scaling == "linear":
        assert section.base_batch_size is not None
        return lr * global_batch_size / section.base_batch_size
    return lr
