"""Reports to torch's GradScaler from outside whether the gradients are finite."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.torch_seams.check import require

require("scaling")


def has_scaled(scaler: torch.amp.GradScaler) -> bool:
    """Return whether a scaler has scaled a loss yet."""
    return scaler._scale is not None


def set_found_inf(scaler: torch.amp.GradScaler, device: torch.device, found: Tensor) -> None:
    """Set the finding that `update` reads: 1.0 if a gradient is not finite, else 0.0, as `unscale_` would."""
    # Any key works, because `update` adds up the findings of all optimizers.
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {device: found}
