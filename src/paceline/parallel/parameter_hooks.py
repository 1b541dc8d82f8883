"""Refuses hooks that users register on parameters, in layouts in which no rank has what they get.

In one process, a hook of `parameter.register_hook` gets the gradient of one microbatch for the whole
parameter. Under dp_shard, tp and cp, a rank has a part or an addend of it. A hook of
`register_post_accumulate_grad_hook` gets a sum over the microbatches that happen to be on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.phrases import name_some
from paceline.torch_seams.tensors import read_accumulate_hooks, read_hooks, set_hooks


def has_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter has hooks of `register_hook`, other than those that only look at a gradient.

    A hook of Paceline's own that returns nothing, and is right for any part of a gradient, says so by its
    attribute `only_looks`.
    """
    return any(not getattr(hook, "only_looks", False) for hook in (read_hooks(parameter) or {}).values())


def count_hooks(parameter: Tensor) -> int:
    """Return the number of hooks of both kinds, to detect a change."""
    return len(read_hooks(parameter) or ()) + len(read_accumulate_hooks(parameter))


def move_hooks(before: Mapping[str, Tensor], model: nn.Module) -> None:
    """Move hooks that only look from replaced parameters to those of a model that replaced them.

    Args:
        before: the replaced parameters by full name.
        model: with the new parameters.
    """
    for name, parameter in model.named_parameters():
        old: Any = before[name]
        if old is not parameter and read_hooks(old) is not None:
            set_hooks(parameter, read_hooks(old))


def check_hooks(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse hooks that would see other numbers than in one process.

    Args:
        named: parameters by full name.
    """
    found = [name for name, each in named if has_hooks(each) or read_accumulate_hooks(each)]
    if found:
        raise PacelineError(
            "PL434",
            saw=f"hooks on the gradients of {name_some(found, 8)}.",
            rule="Such a hook gets the gradient of a microbatch for the whole parameter. Under dp_shard, tp "
            "and cp no rank has that.",
            fix="Use trainer.on_gradients for the sum over all microbatches, or dp_replicate.",
        )
