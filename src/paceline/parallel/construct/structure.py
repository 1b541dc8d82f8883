"""Builds a model without the values that only rank 0 needs, and describes models to compare them by.

Under `WithoutValues`, a tensor is real only if it has the value that it has on rank 0. Tensors that are
drawn, uninitialised, large or computed from such ones are on the meta device. So a factory may read what does
not depend on random numbers, as in `[x.item() for x in torch.linspace(0, 0.1, depth)]`. Reading another value
raises, and the rank then builds the model as rank 0 does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.torch_seams.dispatch import TorchDispatchMode, read_schema
from paceline.torch_seams.modules import STORES
from paceline.torch_seams.tensors import identify
from paceline.torch_seams.trees import tree_iter, tree_map_only

_META = torch.device("meta")
# A new tensor of more elements gets no values, whatever they would be.
MOST_ELEMENTS = 1 << 16


class NoValueError(RuntimeError):
    """A factory needs a value that only rank 0 has."""


class WithoutValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which tensors have values only if these are small and do not depend on random numbers.

    Args:
        most_elements: of a new tensor that gets values.
    """

    def __init__(self, most_elements: int = MOST_ELEMENTS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most_elements = most_elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = read_schema(func), dict(kwargs or {})
        space, name = schema.name.split("::")
        if space == "c10d":
            raise NoValueError("it communicates")  # rank 0 builds only once
        makes = any(argument.name == "device" for argument in schema.arguments)
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not is_random and "empty" not in name and not any(each.is_meta for each in tensors):
            if tensors or not makes:
                return func(*args, **kwargs)
            made = func(*args, **_on_meta(kwargs))
            return made if made.numel() > self._most_elements else func(*args, **kwargs)
        for place, argument in enumerate(schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and any(isinstance(t, Tensor) and not t.is_meta for t in tree_iter(value)):
                raise NoValueError(f"{name} writes what only rank 0 knows")
        args, kwargs = tree_map_only(Tensor, lambda each: each.to(_META), (args, kwargs))
        return func(*args, **(_on_meta(kwargs) if makes else kwargs))


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs | {"device": _META} | dict.fromkeys(kwargs.keys() & {"generator", "pin_memory"})


def list_meta_storages() -> dict[int, Tensor]:
    """Return tensors on the meta device that this process holds, one for each storage."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not is_lazy(each)]
    dense = [each for each in found if each.is_meta and each.layout is torch.strided]
    return {identify(each.untyped_storage()): each for each in dense}


def read_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, then buffers, under all of their names."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def list_held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that modules hold as plain attributes, or in lists, tuples and dicts, with a name."""
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in STORES:
                yield from _list_held(f"{prefix}.{key}" if prefix else key, value)


def _list_held(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple | dict):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _list_held(f"{name}[{key!r}]", item)


def number_windows(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return a number for the bytes that each tensor shows, by name; the same for the same bytes."""
    numbers: dict[Any, int] = {}
    return {name: numbers.setdefault(_window(each), len(numbers)) for name, each in tensors.items()}


def _window(tensor: Tensor) -> tuple[Any, ...]:
    storage, bits = identify(tensor.untyped_storage()), (tensor.is_conj(), tensor.is_neg())
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, bits


def describe_tensors(tensors: dict[str, Tensor]) -> str:
    """Describe parameters and buffers without their values; equal texts mean that they are the same."""
    windows = number_windows(tensors)
    return "\n".join(
        f"{name} {type(each)} {windows[name]} {each.dtype} {each.shape} {each.stride()} {each.requires_grad}"
        for name, each in tensors.items()
    )


def describe_modules(model: nn.Module) -> str:
    """Describe what a model's modules are and which numbers, words and lists of them they hold."""
    lines = []
    for name, module in model.named_modules():
        held = {k: v for k, v in vars(module).items() if k not in STORES and _is_plain(v)}
        lines.append(f"{name} {type(module).__qualname__} {held}")
    return "\n".join(lines)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
