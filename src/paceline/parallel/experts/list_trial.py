"""Lets trial forwards run a mixture that is a list of modules, which the forward around it calls in a loop.

Which tokens an expert gets depends on numbers, which a trial forward does not have. The loop itself is the
user's code, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.torch_seams.dispatch import without_functions, without_modes
from paceline.torch_seams.tensors import is_fake
from paceline.torch_seams.trees import tree_leaves

_MAKING = (torch.zeros, torch.empty, torch.ones, torch.full)
_SEARCHES = (torch.nonzero, Tensor.nonzero)
_READS: dict[str, Callable[[int], Any]] = {"__bool__": bool, "is_nonzero": bool, "item": int, "__int__": int}
_READS |= {"__index__": int}


def is_list(name: str, module: nn.Module) -> bool:
    """Return whether a module is a list of experts, by its name; experts for all tokens are none."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(module) < 2:
        return False
    own = name.rpartition(".")[2].lower()
    return "expert" in own and "shared" not in own and len({type(child) for child in module.children()}) == 1


def find_loops(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose forward calls a list of experts, by full name: mostly the one around it."""
    for name, module in model.named_modules():
        if is_list(name, module):
            has_forward = type(module).forward is not nn.Module.forward
            caller = name if has_forward else name.rpartition(".")[0]
            yield caller, model.get_submodule(caller)


def open_loops(model: nn.Module) -> None:
    """Make trial forwards run the loops over experts, in place."""
    for module in {id(module): module for _, module in find_loops(model)}.values():
        module.forward = MethodType(_follow_trials(module.forward), module)


def _follow_trials(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and is_fake(leaf)]
        if not fakes:
            return forward(*args, **kwargs)
        with TrialLoop(cast(Any, fakes[0]).fake_mode):
            return forward(*args, **kwargs)

    return run


class TrialLoop(TorchFunctionMode):
    """A mode in which a loop over experts runs on tensors without numbers.

    Which tokens an expert gets depends on numbers. In a trial forward each expert gets as many as there are.
    If they are counted, they are divided evenly. No expert is left out.
    """

    def __init__(self, fake: Any) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor) or not is_fake(args[0]):
            found = func(*args, **kwargs)
            if func in _MAKING and not is_fake(found):
                # The loop adds answers to it, which have no numbers.
                with without_functions():
                    found = self._fake.from_tensor(found)
            return found
        given, name = args[0], _name(func)
        if name in _READS and not given.dim() and not given.is_floating_point():
            return _READS[name](1)  # an expert has tokens
        if name == "bincount":
            length = max(1, kwargs.get("minlength", args[2] if len(args) > 2 else 0))
            with without_functions(), without_modes():
                return torch.bincount(torch.arange(given.numel()) % length, minlength=length)
        if name in ("__getitem__", "__setitem__") and isinstance(args[1], Tensor | tuple):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (given, tuple(each for part in index for each in _search(part, given)), *args[2:])
        elif given.dim() and (func in _SEARCHES or (func is torch.where and len(args) == 1)):
            places = _find(given)
            return places if func is torch.where or kwargs.get("as_tuple") else torch.stack(places, 1)
        return func(*args, **kwargs)


def _find(mask: Tensor, num_found: int | None = None) -> tuple[Tensor, ...]:
    """Return places where a mask might be true: as many as its longest dimension has."""
    return tuple(mask.new_zeros(num_found or max(mask.shape), dtype=torch.int64) for _ in mask.shape)


def _search(index: Any, given: Tensor) -> tuple[Any, ...]:
    """Return a part of an index with places instead of a mask without numbers."""
    if not isinstance(index, Tensor) or index.dtype != torch.bool or not index.dim() or not is_fake(index):
        return (index,)
    # A mask of rows may be true everywhere; one of single numbers says which of a token's choices it is.
    return _find(index, index.numel() if index.dim() < given.dim() else None)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))
