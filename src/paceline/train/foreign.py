"""Refuses models that other tools have laid out, and unwraps those that torch.compile wraps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch_seams.modules import find_compiled


def open_models(model: Any, compiles: bool) -> tuple[Any, bool]:
    """Return the modules that `Trainer` trains, without the wrappers of `torch.compile`.

    Args:
        model: a module, a factory, or a dict of these.
        compiles: whether the trainer compiles them.

    Returns:
        The models, and whether to compile them after they are laid out.
    """
    if isinstance(model, Mapping):
        opened = {name: open_models(each, compiles) for name, each in model.items()}
        return {name: each for name, (each, _) in opened.items()}, any(found for _, found in opened.values())
    if not isinstance(model, nn.Module):
        return model, compiles
    while found := find_compiled(model):  # its parameters have a prefix
        name, module = found
        if name:
            model.set_submodule(name, module)
        model, compiles = model if name else module, True
    wrapped = isinstance(model, (DistributedDataParallel, nn.DataParallel, FSDPModule))
    if wrapped or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise PacelineError(
            "PL929",
            saw=f"a model that is laid out already, a {type(model).__name__}.",
            rule="The trainer lays out the model itself and sums its gradients; both would count twice.",
            fix='Pass the module as it was before, with layout="dp_replicate=2", "dp_shard=2" or another.',
        )
    return model, compiles


def refuse_compiled(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a factory that raises PL929 for a compiled model, whose names would have a prefix."""

    @functools.wraps(factory)
    def build() -> nn.Module:
        model = factory()
        if isinstance(model, nn.Module) and find_compiled(model) is not None:
            raise PacelineError(
                "PL929",
                saw="a factory that returns a model compiled by torch.compile.",
                rule="The model is laid out first, and compiled then.",
                fix="Return the model uncompiled, and pass Trainer(compile=True).",
            )
        return model

    return build
