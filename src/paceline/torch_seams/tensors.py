"""Reach into torch's tensors."""

from __future__ import annotations

from types import FrameType

from torch import Tensor

from paceline.torch_seams.check import require

require("tensors")


def is_pickling(frame: FrameType) -> bool:
    """Return whether a frame is the one in which torch turns a tensor into what pickle writes."""
    return frame.f_code is Tensor._reduce_ex_internal.__code__
