"""Compiles the blocks of a model that is cut into stages, each by itself.

A stage follows calls in the model's forward. Compiled code does not show them, but inside of a stage's own
blocks nothing is followed. So a block runs compiled where it is a stage's own, and uncompiled in the trial
forward, which needs shapes alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from paceline.parallel.dropout.scope import compiled
from paceline.parallel.stages.walk import CompiledBlock
from paceline.torch_seams.modules import find_call, set_compiled_call

log = logging.getLogger(__name__)


def compile_call(module: nn.Module) -> Callable[..., Any]:
    """Return a module's call, compiled."""
    call = find_call(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    # The same as Module.compile(), with a frame of Paceline in between: the compiler skips the frames of
    # torch.nn's own classes, so that it would silently leave an nn.Sequential uncompiled.
    return compiled(module, torch.compile(forward))


def compile_blocks(model: nn.Module, names: Collection[str], held: Collection[str]) -> None:
    """Compile blocks for the stages that they belong to.

    Args:
        model: cut into stages.
        names: full names of all modules that a stage may begin with.
        held: those of them that this rank computes.
    """
    for name in names:
        module = model.get_submodule(name)
        set_compiled_call(module, CompiledBlock(name, find_call(module), compile_call(module)))
    log.info("compile: torch.compile over %d blocks of this rank's stages", len(held))
