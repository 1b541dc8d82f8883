"""Recompute modules in backward, and get between torch and the forward that it runs again."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from paceline.torch_seams.check import checked, set_existing

with checked("recomputing"):
    from torch.distributed._composable.checkpoint_activation import checkpoint

_GENERATOR = "_checkpoint_without_reentrant_generator"

__all__ = ["checkpoint", "find_generator", "set_generator"]


def find_generator() -> Callable[..., Iterator[None]]:
    """Return the generator function around each forward that checkpointing without reentry runs."""
    found: Callable[..., Any] = getattr(torch_checkpoint, _GENERATOR)
    return found


def set_generator(generate: Callable[..., Iterator[None]]) -> None:
    """Put another generator function in its place."""
    # The name of this module is also the name of a function in its package, and it has its own reference.
    composable = importlib.import_module(checkpoint.__module__)
    for module in (torch_checkpoint, composable):
        set_existing(module, _GENERATOR, generate)
