"""Changes sizes in a model's code, such as the number of heads in `x.view(batch, -1, self.num_heads, width)`.

With parts of the parameters, a size that counts a cut dimension must be that of the part. If the code takes
it from a tensor's shape or leaves it to -1, it is correct already. If it is a number of the module (or
derived from one), it is changed on the way into the function of torch, in just the calls (`calls.py`) in
which the trial forward found it. The module's own numbers are not changed, because code may use them for
other purposes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.tensor.calls import Change as CallChange

Change = Callable[[int], int]

_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.expand}
_SPLITS = {Tensor.split, torch.split}
_UNFLATTENS = {Tensor.unflatten, torch.unflatten}
_CREATORS = {torch.zeros, torch.ones, torch.empty, torch.randn, torch.rand}
SIZED = _VIEWS | _SPLITS | _UNFLATTENS | _CREATORS
# Calls whose arguments may hold the length of a sequence; cp changes them (`context/lengths.py`).
LENGTHY = frozenset({torch.arange, Tensor.__getitem__})


def change_size(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, change: Change
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with the size that it gives a dimension of its result changed.

    Args:
        dim: of the result; nothing is changed if the call does not specify its size.
        change: from the given size to the one to use; not called for -1.
    """
    if func in _VIEWS or func in _CREATORS:
        start = 0 if func in _CREATORS else 1
        key = next((k for k in ("size", "shape") if k in kwargs), None)
        if key is not None:
            return args, {**kwargs, key: _change_at(kwargs[key], dim, change)}
        given = args[start:]
        if len(given) == 1 and isinstance(given[0], (tuple, list)):
            return (*args[:start], _change_at(given[0], dim, change)), kwargs
        if given and all(isinstance(size, int) for size in given):
            return (*args[:start], *_change_at(given, dim, change)), kwargs
        return args, kwargs
    if func in _SPLITS:
        place = kwargs.get("dim", args[2] if len(args) > 2 else 0) % args[0].dim()
        if place != dim or len(args) < 2:
            return args, kwargs
        sizes = args[1]
        changed = change(sizes) if isinstance(sizes, int) else [change(size) for size in sizes]
        return (args[0], changed, *args[2:]), kwargs
    place = kwargs.get("dim", args[1] if len(args) > 1 else 0) % args[0].dim()
    if len(args) > 2:
        return (*args[:2], _change_at(args[2], dim - place, change), *args[3:]), kwargs
    return args, {**kwargs, "sizes": _change_at(kwargs["sizes"], dim - place, change)}


def _change_at(sizes: Any, dim: int, change: Change) -> tuple[int, ...]:
    return tuple(
        change(size) if at == dim and isinstance(size, int) and size != -1 else size
        for at, size in enumerate(sizes)
    )


def divide_size(dim: int, num_ranks: int) -> CallChange:
    """Return a change that makes a call give a dimension of its result the size of a part."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        args, kwargs = change_size(func, args, kwargs, dim, lambda size: size // num_ranks)
        return run(*args, **kwargs)

    return change
