"""Compiles the blocks of a model that is cut into stages, each by itself.

A stage follows calls in the model's forward. Compiled code does not show them, but inside of a stage's own
blocks nothing is followed. So a block runs compiled where it is a stage's own, and uncompiled in the trial
forward, which needs shapes alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from paceline.parallel.dropout.scope import compiled
from paceline.parallel.stages.walk import CompiledBlock
from paceline.torch_seams.modules import find_call, set_compiled_call

log = logging.getLogger(__name__)


def compile_blocks(model: nn.Module, names: Collection[str], held: Collection[str]) -> None:
    """Compile blocks for the stages that they belong to.

    Args:
        model: cut into stages.
        names: full names of all modules that a stage may begin with.
        held: those of them that this rank computes.
    """
    for name in names:
        _compile_block(name, model.get_submodule(name))
    log.info("compile: torch.compile over %d blocks of this rank's stages", len(held))


def _compile_block(name: str, module: nn.Module) -> None:
    call = find_call(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    compiled_call = compiled(module, torch.compile(forward))
    set_compiled_call(module, CompiledBlock(name, call, compiled_call))
