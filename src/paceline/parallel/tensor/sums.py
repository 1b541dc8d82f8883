"""Sums over the ranks that arise inside a forward, computed in the call that produces the addends.

A layer of torch that runs torch's own forward is replaced as a whole (`apply.py`). All other code is the
user's: a subclass of `nn.Linear` that scales, an embedding that multiplies, a forward patched on one
instance. It runs unchanged. Only its calls of some functions of torch (`calls.SUMMED`) return the sum over
the ranks in place of a rank's addend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.mesh import Axis
from paceline.parallel.tensor.calls import Change
from paceline.parallel.tensor.vocabulary import look_up

_LOOKUP = inspect.signature(F.embedding)


def add_up_call(change: Callable[[Tensor], Tensor]) -> Change:
    """Return a change that makes a call of a product return the sum over the ranks.

    Args:
        change: from a rank's addend to the sum.
    """

    def add_up(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is torch.addmm:
            bias, left, right = args
            total = change(torch.mm(left, right))
            return total + bias.to(total.dtype)
        return change(run(*args, **kwargs))

    def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        total = change(F.linear(input, weight))
        return total if bias is None else total + bias.to(total.dtype)

    return add_up


def add_up_lookup(change: Callable[[Tensor], Tensor], axis: Axis) -> Change:
    """Return a change that makes a call of `F.embedding` return the sum over the ranks' rows."""

    def add_up(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Callable[..., Any]) -> Any:
        given = _LOOKUP.bind(*args, **kwargs).arguments
        padding = given.get("padding_idx")
        if padding is not None and padding < 0:
            padding += given["weight"].shape[0] * axis.size
        return change(look_up(given["weight"], given["input"], padding, axis))

    return add_up


def is_plain_lookup(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of `F.embedding` reads its table and does nothing else to it."""
    given = _LOOKUP.bind(*args, **kwargs).arguments
    return given.get("max_norm") is None and not given.get("sparse") and not given.get("scale_grad_by_freq")
