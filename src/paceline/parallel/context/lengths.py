"""Changes lengths in a model's code, such as those of `mask[:, :, :length, :length]` or `arange(length)`.

Code inside of an attention may take the length of the sequence from its input, which holds a part of it.
Where the whole length is needed, it is given instead, in just the calls in which the trial forward found it.
`tensor/sizes.py` does the same for calls that are given the size of their result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.tensor.sizes import SIZED, change_size

Change = Callable[[int], int]


def change_given(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, change: Change
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with the size that it gives dimension `dim` of its result changed.

    Args:
        dim: of the result; nothing is changed if the call does not specify its size.
        change: from the given size to the one to use.
    """
    if func in SIZED:
        return change_size(func, args, kwargs, dim, change)
    if func is torch.arange:
        place = 1 if len(args) > 1 else 0
        if len(args) in (1, 2) and isinstance(args[place], int) and (place == 0 or args[0] == 0):
            return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs
        return args, kwargs
    return (args[0], _change_stop(args[0], args[1], dim, change)), kwargs


def _change_stop(tensor: Tensor, index: Any, dim: int, change: Change) -> Any:
    """Return an index with the end of the slice that makes dimension `dim` of its result changed."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is Ellipsis or isinstance(item, (int, slice)) for item in items):
        return index
    num_taken = sum(item is not None and item is not Ellipsis for item in items)
    place, changed = 0, []
    for item in items:
        if item is Ellipsis:
            place += tensor.dim() - num_taken
        elif isinstance(item, slice):
            if place == dim and isinstance(item.stop, int) and not isinstance(item.start, Tensor):
                item = slice(item.start, change(item.stop), item.step)
            place += 1
        elif item is None:
            place += 1
        changed.append(item)
    return tuple(changed) if isinstance(index, tuple) else changed[0]
