"""Runs hooks that users register on parameters, under tp and cp.

A hook of `parameter.register_hook` gets the same as in one process: the gradient of one microbatch for the
whole parameter (see `parallel/parameter_hooks.py`, which does the same for dp_shard). All ranks of tp run it
on the same numbers, and each keeps its part of the result. A split parameter with a hook costs one all-gather
of its gradient per microbatch and hook. A whole parameter of whose gradient ranks have addends costs one
all-reduce.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.mesh import Axis
from paceline.parallel.parameter_hooks import check_hooks
from paceline.parallel.split import Split
from paceline.parallel.tensor.collectives import all_gather, all_reduce
from paceline.torch_seams.tensors import read_hooks, set_hooks

Hook = Callable[[Tensor], Tensor | None]


def show_whole_gradients(
    before: Mapping[str, Tensor],
    model: nn.Module,
    splits: Mapping[str, Split],
    partial: Collection[str],
    axis: Axis,
) -> None:
    """Pass whole gradients to the hooks of a model's parameters, including hooks that are registered later.

    Handles that users hold still remove their hooks. No collective runs here; backward has some if there are
    hooks.

    Args:
        before: the parameters by full name, as users have seen them.
        model: with the parts in place of the whole parameters.
        splits: by full name.
        partial: names of whole parameters that get an addend of their gradient on each rank.
        axis: tp or cp.

    Raises:
        PacelineError: PL434 for hooks on accumulated gradients.
    """
    check_hooks(before.items())
    for name, parameter in model.named_parameters():
        run: Callable[[Hook, Tensor], Tensor]
        if name in splits:
            run = _SplitGradient(splits[name], axis)
        elif name in partial:
            run = _AddedGradient(axis)
        else:
            continue  # every rank has the whole gradient
        known = read_hooks(before[name])
        if isinstance(known, _Hooks):  # of another axis, which divides the gradient too
            known.enclose(run)
        else:
            set_hooks(parameter, _Hooks(run, known))


class _Hooks(OrderedDict[int, Any]):
    """The hooks of one parameter, each wrapped so that it gets the whole gradient.

    torch keeps a parameter's hooks in a dictionary and adds later ones to it.

    Args:
        run: calls a hook with the whole gradient, and returns this rank's part of its result.
        earlier: the dictionary that the parameter had before; handles of these hooks refer to it.
    """

    def __init__(self, run: Callable[[Hook, Tensor], Tensor], earlier: Any) -> None:
        super().__init__()
        self._run = run
        if earlier:
            self[-1] = _InOrder(earlier)  # torch counts from 0

    def __setitem__(self, key: int, hook: Hook) -> None:
        super().__setitem__(key, lambda gradient: self._run(hook, gradient))

    def enclose(self, run: Callable[[Hook, Tensor], Tensor]) -> None:
        """Make a gradient whole along a further axis, before it is made whole along the present ones."""
        inner = self._run
        self._run = lambda hook, gradient: run(lambda whole: inner(hook, whole), gradient)


class _InOrder:
    """A call of all hooks of a dictionary in order, as they are when it runs."""

    def __init__(self, hooks: Mapping[int, Hook]) -> None:
        self._hooks = hooks

    def __call__(self, gradient: Tensor) -> Tensor:
        for hook in list(self._hooks.values()):
            result = hook(gradient)
            gradient = gradient if result is None else result
        return gradient


class _SplitGradient:
    def __init__(self, split: Split, axis: Axis) -> None:
        self._split, self._axis = split, axis

    def __call__(self, hook: Hook, gradient: Tensor) -> Tensor:
        whole = self._split.join(all_gather(gradient.unsqueeze(0), self._axis, 0).unbind(0))
        result = hook(whole)
        # The whole gradient is taken even if the hook returned `None`, which may have changed it in place.
        return self._split.take(whole if result is None else result, self._axis.rank)


class _AddedGradient:
    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __call__(self, hook: Hook, gradient: Tensor) -> Tensor:
        total = all_reduce(gradient, self._axis)
        result = hook(total)
        total = total if result is None else result
        # The ranks' gradients are summed once more after the last microbatch, so only one rank keeps the sum.
        return total if self._axis.rank == 0 else torch.zeros_like(total)
