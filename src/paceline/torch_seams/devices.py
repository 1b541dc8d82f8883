"""Reads whether CUDA can still start in this process."""

from __future__ import annotations

import torch


def is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that has started a driver, which the fork has lost.

    `torch.cuda.is_available()` starts it, and leaves `is_initialized()` false.
    """
    return bool(torch.cuda._is_in_bad_fork())
