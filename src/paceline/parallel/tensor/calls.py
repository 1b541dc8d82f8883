"""Finds calls of torch's functions in a module's own forward, by their place in the source.

A plan is derived from a trial forward and carried out in later ones, so both must agree on which call is
which. A call is identified by the chain of source positions from the module's `forward` down to it, and by
how often that chain was passed in this forward. A branch that only one of the two forwards takes does not
shift other calls.

Calls that the module's forward does not make are not counted: those of modules that it calls, of any hooks,
and of Paceline itself (masks, collectives). Calls of a function that the forward passes to
`torch.utils.checkpoint` are not counted either, because backward runs it again, outside of the forward.
Tensors that such calls need stay whole.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from paceline.parallel.dropout.replacements import SHOWING, attend
from paceline.torch_seams.modules import CALL
from paceline.torch_seams.operators import ATTENTION

# File, function and instruction (of attention: expression), from the call outwards; torch's own files are
# left out.
Site = tuple[tuple[str, str, int], ...]
# Replaces a call of a function of torch: from (function, arguments, keywords, run) to the result. `run` takes
# the arguments that the function gets, and applies the changes of earlier `change_calls` to them.
Change = Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]
# Functions whose result may be a sum over the ranks.
SUMMED = frozenset(
    {
        F.linear,
        torch.addmm,
        torch.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
        torch.mm,
        Tensor.mm,
        torch.bmm,
        Tensor.bmm,
        torch.einsum,
        torch.tensordot,
        F.embedding,
    }
)


# Attention as one call, with dropout (`dropout/replacements.py`) or without.
ATTENDING = frozenset({ATTENTION, attend})


class CallSite(NamedTuple):
    """The identity of one call in a module's forward.

    Attributes:
        site: the place in the source.
        number: of the call among those there in this forward, from 0.
    """

    site: Site
    number: int


def find_site(func: Any) -> Site | None:
    """Return the site of the call of `func` that a function mode was just given.

    `__torch_function__` itself must call this.

    Returns:
        `None` if the call does not come from a forward that `run_inside` knows.
    """
    found: list[tuple[str, str, int]] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is _FORWARD:
            return tuple(found)
        if code is CALL:  # a hook of a module
            return None
        if code.co_filename == _CHECKPOINT:
            return None
        if code is not SHOWING and not code.co_filename.startswith(_TORCH):
            if not found and code.co_filename.startswith(_OWN) and code.co_filename != _ATTENTION:
                return None
            # With dropout, attention is a Python function in place of torch's own, and the interpreter calls
            # the two by different instructions.
            is_attention = not found and func in ATTENDING
            place = _locate(code, frame.f_lasti) if is_attention else frame.f_lasti
            found.append((code.co_filename, code.co_qualname, place))
        frame = frame.f_back
    return None


def find_line() -> tuple[str, int, str] | None:
    """Return the file, line and function of the innermost frame that is neither Paceline's nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_TORCH, _OWN, "<")):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def _locate(code: CodeType, instruction: int) -> int:
    """Return a number for the expression in the source that an instruction belongs to."""
    places = next(itertools.islice(code.co_positions(), instruction // 2, None))
    return hash(tuple(place or 0 for place in places))


def run_inside(module: nn.Module, around: Callable[[], Any]) -> Callable[[], None]:
    """Run a module's forwards inside a context, without its hooks.

    Args:
        module: its `forward` is replaced on the instance.
        around: returns the context of one forward.

    Returns:
        A function that restores the forward.
    """
    patched = module.__dict__.get("forward")
    module.forward = _bind(module.forward, around)

    def restore() -> None:
        if patched is None:
            del module.__dict__["forward"]
        else:
            module.forward = patched

    return restore


def change_calls(
    module: nn.Module,
    functions: Container[Any],
    changes: Mapping[Site, Sequence[Change | None]],
    unknown: Change | None = None,
) -> None:
    """Replace some calls in a module's own forward from now on, in addition to those replaced before.

    Args:
        module: the forwards of modules that it calls are not changed.
        changes: by site, for each call there in turn. Calls beyond these are treated as the last one, for
            example in a loop that is longer than it was in the trial.
        unknown: for calls of attention at any other site.
    """
    layers: list[_Layer] | None = getattr(module.__dict__.get("forward"), _LAYERS, None)
    if layers is not None:
        # One mode for all: a mode does not see by which place of the source another mode was entered.
        layers.append(_Layer(functions, changes, unknown))
        return
    layers = [_Layer(functions, changes, unknown)]
    run_inside(module, lambda: _Changing(layers))
    # The compiler cannot read positions in the source.
    module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
    setattr(module.forward, _LAYERS, layers)


def change_operand(func: Any, args: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """Return the arguments of a product of `SUMMED` with its left operand, the activation, changed."""
    place = find_operand(func)
    return (*args[:place], change(args[place]), *args[place + 1 :])


def find_operand(func: Any) -> int:
    """Return the place of the left operand among the arguments of a product."""
    return 1 if func is torch.addmm else 0


class _Layer(NamedTuple):
    """The calls that one call of `change_calls` replaces."""

    functions: Container[Any]
    changes: Mapping[Site, Sequence[Change | None]]
    unknown: Change | None


class _Changing(TorchFunctionMode):
    """A mode that replaces calls during one forward."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        super().__init__()
        self._layers = layers
        self._passed: Counter[tuple[int, Site]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = func
        if any(func in layer.functions for layer in self._layers):
            site = find_site(func)
            if site is not None:
                for number, layer in enumerate(self._layers):
                    change = self._find_change(number, layer, func, site)
                    if change is not None:
                        run = _then(change, func, run)
        return run(*args, **(kwargs or {}))

    def _find_change(self, number: int, layer: _Layer, func: Any, site: Site) -> Change | None:
        """Count a call, and return the layer's change of it."""
        changes = layer.changes.get(site)
        if func not in layer.functions:
            return None
        if not changes:
            return layer.unknown if func in ATTENDING else None
        passed = self._passed[number, site]
        self._passed[number, site] += 1
        return changes[min(passed, len(changes) - 1)]


def _then(change: Change, func: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(func, args, kwargs, run)


def _bind(inner: Callable[..., Any], around: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with around():
            return inner(*args, **kwargs)

    return forward


# The attribute of a changed forward with the calls that are replaced in it.
_LAYERS = "paceline_changed_calls"
_FORWARD = _bind(lambda: None, lambda: None).__code__
_TORCH = str(Path(CALL.co_filename).parents[2]) + os.sep
_CHECKPOINT = CheckpointFunction.forward.__code__.co_filename
_OWN = str(Path(_FORWARD.co_filename).parents[1]) + os.sep
# It holds a forward that replaces one of torch's.
_ATTENTION = str(Path(_FORWARD.co_filename).with_name("attention.py"))
