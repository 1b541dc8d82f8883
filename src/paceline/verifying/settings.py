"""The settings that a module, the optimizer and a process have, so that ranks can be compared directly.

A rank whose LayerNorm has another eps, whose `torch.nn.functional.gelu` was replaced or whose optimizer has
another learning rate gives other numbers. The numbers alone do not show why; the settings do.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from paceline.torch_seams.modules import list_hooks as list_module_hooks
from paceline.torch_seams.tensors import read_hooks
from paceline.train.same_settings import describe_code
from paceline.verifying.observe import as_numbers

# Owners of settings that belong to no module.
FUNCTIONS = "functions"
PROCESS = "the process"
OPTIMIZER = "the optimizer"

_INTERNAL = frozenset(vars(nn.Module()))
_OURS = ("paceline", "torch", "_pytest")
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_MAX_LENGTH = 200
# Values of a collection, and elements of a tensor, that count as settings.
_MAX_LISTED = 64


@dataclass(frozen=True)
class SettingDifference:
    """A setting of a rank that is not the reference's.

    Attributes:
        rank: the rank that has it.
        owner: full name of a module, or `FUNCTIONS`, `PROCESS`, `OPTIMIZER`.
        expected: in one process; empty if it has none.
        found: on the rank; empty if it has none.
    """

    rank: int
    owner: str
    name: str
    expected: str
    found: str


def list_module_settings(module: nn.Module) -> dict[str, str]:
    """Return the plain settings of a module and of the settings objects that it keeps, as text.

    The key `forward` is the code that the module runs. What Paceline or torch put there is left out.
    """
    found = {"forward": describe_code(inspect.getattr_static(type(module), "forward"))}
    for key, value in vars(module).items():
        if key in _INTERNAL and key != "training":
            continue
        if key == "forward" or (callable(value) and not isinstance(value, nn.Module | type)):
            if not _is_ours(value):
                found[key] = describe_code(value)
        else:
            found |= {name: repr(each)[:_MAX_LENGTH] for name, each in _list_plain(key, value)}
    return found


def _list_plain(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield the plain values in a setting: itself, or those of a dict, a list or a settings object."""
    if _is_plain(value):
        yield name, value
    elif isinstance(value, Tensor):
        if value.is_cpu and type(value) is Tensor and value.numel() <= _MAX_LISTED:
            yield name, as_numbers(value).tolist()
    elif isinstance(value, set | frozenset):
        yield name, sorted(map(repr, value))
    elif depth and not isinstance(value, nn.Module | type):
        inner: Iterable[tuple[str, Any]] = ()
        if isinstance(value, Mapping):
            inner = ((f"{name}[{key!r}]", each) for key, each in value.items())
        elif isinstance(value, tuple | list):
            inner = ((f"{name}[{place}]", each) for place, each in enumerate(value))
        elif hasattr(value, "__dict__"):
            inner = ((f"{name}.{key}", each) for key, each in vars(value).items())
        for key, each in itertools.islice(inner, _MAX_LISTED):
            yield from _list_plain(key, each, depth - 1)


def list_hooks(module: nn.Module) -> list[str]:
    """Return the names of the hooks that users put on a module and on its own parameters."""
    hooks = list_module_hooks(module)
    for parameter in module.parameters(recurse=False):
        hooks += (read_hooks(parameter) or {}).values()
    return [_name(hook) for hook in hooks if not _is_ours(hook)]


def list_functions() -> dict[str, str]:
    """Return the functions of torch that code outside torch and Paceline has replaced in this process."""
    found = {}
    for holder in (torch.nn.functional, torch, torch.Tensor, torch.distributed):
        name = getattr(holder, "__qualname__", holder.__name__)
        name = f"torch.{name}" if not name.startswith("torch") else name
        for key, value in list(vars(holder).items()):
            kind = type(value)  # isinstance would wake torch's deprecated objects, which warn
            if key.startswith("_") or kind not in (FunctionType, functools.partial):
                continue
            if kind is functools.partial or not _is_ours(value):
                found[f"{name}.{key}"] = describe_code(value)
    return found


def list_process_settings() -> dict[str, str]:
    """Return settings of torch that hold for the whole process."""
    found: dict[str, Any] = {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.is_autocast_enabled('cuda')": torch.is_autocast_enabled("cuda"),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.backends.mkldnn.enabled": torch.backends.mkldnn.enabled,
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
    }
    return {name: str(value) for name, value in found.items()}


def compare_settings(
    rank: int, owner: str, expected: dict[str, str], found: dict[str, str]
) -> list[SettingDifference]:
    """Return what differs between one owner's settings in one process and on a rank.

    A private name that one process lacks is left out: a layout keeps its notes on a module that way.
    """
    return [
        SettingDifference(rank, owner, name, expected.get(name, ""), found.get(name, ""))
        for name in sorted({*expected, *found})
        if expected.get(name) != found.get(name) and not (name.startswith("_") and name not in expected)
    ]


def drop_layouts_own(differences: Iterable[SettingDifference], num_ranks: int) -> list[SettingDifference]:
    """Leave out whole numbers that no rank has as one process has them: sizes of a layout's parts."""
    kept: list[SettingDifference] = []
    by_setting: dict[tuple[str, str], set[int]] = {}
    listed = list(differences)
    for difference in listed:
        by_setting.setdefault((difference.owner, difference.name), set()).add(difference.rank)
    for difference in listed:
        is_everywhere = len(by_setting[difference.owner, difference.name]) == num_ranks
        if not (is_everywhere and _is_size(difference.expected) and _is_size(difference.found)):
            kept.append(difference)
    return kept


def _is_size(text: str) -> bool:
    return bool(text) and all(part.strip().isdigit() for part in text.strip("()[],").split(","))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return len(value) <= 8 and all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, _PLAIN)


def _unwrap(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _is_ours(function: Any) -> bool:
    inner = _unwrap(function)
    module = getattr(inner, "__module__", None) or type(inner).__module__ or ""
    return module.split(".")[0] in _OURS


def _name(function: Any) -> str:
    inner = _unwrap(function)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{getattr(inner, '__module__', '') or type(inner).__module__}.{name}"
