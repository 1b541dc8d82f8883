"""Recomputes modules in backward, and replaces the generator around the repeated forward."""

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
    """Replace the generator function of `find_generator`."""
    # The composable module has its own reference. It is imported by name, because its package has a function
    # of the same name.
    composable = importlib.import_module(checkpoint.__module__)
    for module in (torch_checkpoint, composable):
        set_existing(module, _GENERATOR, generate)
