"""Hooks that users register on parameters, in layouts that put another tensor in a parameter's place.

Under dp_shard a parameter of the model is this rank's shard, while forward and backward use the gathered one.
Autograd never sees the shard, so it would never run a hook of it. These functions keep such hooks working.
(Under tp, `tensor/gradients.py` does the same.)

A hook of `parameter.register_hook` sees what it sees in one process: the gradient of one microbatch, as
backward has computed it, for the whole parameter. It is not yet added to the gradients of other microbatches
and ranks. It is multiplied by the loss scale under fp16, and has the type in which the forward computes.
The hook runs once per microbatch, on the rank that computes it. What it returns takes the gradient's place.
It may be registered before the model is laid out or later, on a parameter of `trainer.model`. Its handle
removes it.

A hook of `register_post_accumulate_grad_hook` is refused (PL434): what it sees is a sum over as many
microbatches as happen to be on a rank, so its numbers would depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.torch_seams.tensors import read_accumulate_hooks, read_hooks, set_hooks


def has_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter has hooks of `register_hook`."""
    return bool(read_hooks(parameter))


def move_hooks(before: Mapping[str, Tensor], model: nn.Module) -> None:
    """Give the parameters of a model the hooks of those that they have replaced.

    The dictionaries themselves move, so a handle that a user holds still removes its hook.

    Args:
        before: the replaced parameters by full name.
        model: with the parameters that are in their places.
    """
    for name, parameter in model.named_parameters():
        old: Any = before[name]
        if old is not parameter and read_hooks(old) is not None:
            set_hooks(parameter, read_hooks(old))


def run_hooks(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Run a parameter's hooks on a gradient in the order of registration, as autograd does.

    Args:
        parameter: holds the hooks.
        gradient: of the whole parameter.

    Returns:
        The gradient, or what the hooks have put in its place.
    """
    hooks: Any = read_hooks(parameter)
    for hook in list((hooks or {}).values()):
        result = hook(gradient)
        gradient = gradient if result is None else result
    return gradient


def check_hooks(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse hooks whose numbers would depend on the layout.

    Args:
        named: parameters by full name.

    Raises:
        PacelineError: PL434, naming the parameters.
    """
    found = [name for name, parameter in named if read_accumulate_hooks(parameter)]
    if found:
        raise PacelineError(
            "PL434",
            saw=f"register_post_accumulate_grad_hook on {', '.join(found[:8])}"
            + (f" and {len(found) - 8} more." if len(found) > 8 else "."),
            rule="Such a hook sees the gradient after each microbatch of this rank is added. With dp_shard "
            "or tp no rank has that sum whole. With any layout it depends on how microbatches are shared.",
            fix="Use parameter.register_hook for the gradient of each microbatch, or trainer.on_gradients "
            "for the sum over all of them.",
        )
