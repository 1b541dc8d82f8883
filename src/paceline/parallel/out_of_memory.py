"""Recognises torch's errors for exhausted memory."""

from __future__ import annotations

import torch

_CPU_MESSAGES = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that the memory of a device or of the machine is exhausted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _CPU_MESSAGES)
