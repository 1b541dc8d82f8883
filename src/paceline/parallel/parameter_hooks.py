"""Runs hooks that users register on parameters, in layouts that replace a parameter by another tensor.

Under dp_shard a parameter of the model is this rank's shard, while forward and backward use the gathered one.
Autograd never uses the shard, so it would never run a hook of it. These functions keep such hooks working.
(Under tp, `tensor/gradients.py` does the same.)

A hook of `parameter.register_hook` gets the same as in one process: the gradient of one microbatch, as
backward has computed it, for the whole parameter. It is not yet added to the gradients of other microbatches
and ranks. It is multiplied by the loss scale under fp16, and has the type in which the forward computes. The
hook runs once per microbatch, on the rank that computes it. Its result replaces the gradient. It may be
registered before the model is laid out or later, on a parameter of `trainer.model`. Its handle removes it.

A hook of `register_post_accumulate_grad_hook` is refused (PL434): it gets a sum over the microbatches that
happen to be on one rank, so its numbers would depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.torch_seams.tensors import read_accumulate_hooks, read_hooks, set_hooks


def has_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter has hooks of `register_hook`, other than those that only look at a gradient.

    A hook of Paceline's own that returns nothing, and is right for any part of a gradient, says so by its
    attribute `only_looks`.
    """
    return any(not getattr(hook, "only_looks", False) for hook in (read_hooks(parameter) or {}).values())


def move_hooks(before: Mapping[str, Tensor], model: nn.Module) -> None:
    """Move hooks from replaced parameters to the parameters of a model that replaced them.

    The dictionaries themselves move, so a handle that a user holds still removes its hook.

    Args:
        before: the replaced parameters by full name.
        model: with the new parameters.
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
        The gradient, or the tensor with which the hooks have replaced it.
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
        PacelineError: PL434, with the parameters' names.
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
