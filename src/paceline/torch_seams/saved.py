"""Reads what autograd's nodes have saved for backward, without running anybody's hooks.

Nothing of torch is imported here, because the process may be short of memory. Functions get what they look
at.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from types import FrameType
from typing import Any

from paceline.torch_seams.table import VIEW_NODES

_PREFIX = "_saved_"
_MANY_DEEP = 4
# A chain of views from a weight to the product that uses it: cast, transposed, expanded.
_MANY_VIEWS = 6


class _PackedError(Exception):
    """The error that ends a hook before it begins."""


def find_order(node: Any) -> int:
    """Return the number of a node: nodes of later operations have higher ones; -1 if it cannot be known."""
    with suppress(Exception):
        return int(node._sequence_nr())
    return -1


def find_leaf(node: Any) -> Any | None:
    """Return the parameter into whose gradient a node adds up, `None` for other nodes."""
    return getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None


def find_parameters(node: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the leaves that a node uses through views, casts and transposes, and whether without any."""
    for child, _ in node.next_functions:
        for number in range(_MANY_VIEWS):
            if child is None:
                break
            leaf = find_leaf(child)
            if leaf is not None:
                yield leaf, not number
                break
            if type(child).__name__ not in VIEW_NODES:
                break
            child = child.next_functions[0][0] if child.next_functions else None


def list_saved(node: Any, tensor_class: type) -> list[Any]:
    """Return the tensors that a node has saved.

    Hooks for saved tensors (recomputing, moving to the CPU) may run a forward or copy, which a process
    without memory must not. So a hook is stopped as it is called, and the tensors in what it would have
    unpacked are returned in place of its result.

    Args:
        tensor_class: `torch.Tensor`.
    """
    found: list[Any] = []
    kind: Any = type(node)
    for name in _list_names(kind):
        _collect(_read(partial(getattr, node, name)), tensor_class, found)
    if hasattr(kind, "saved_tensors"):  # a function of Python
        _collect(_read(partial(getattr, node, "saved_tensors")), tensor_class, found)
        with suppress(TypeError):  # A node of C++ has no attributes of its own.
            _collect(list(vars(node).values()), tensor_class, found)
    return found


@lru_cache(maxsize=512)
def _list_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_PREFIX))


def _read(read: Callable[[], Any]) -> Any:
    """Return what `read` returns, or the arguments of the function of Python that it calls."""
    packed: list[Any] = []

    def stop(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        packed.extend(frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount])
        raise _PackedError

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # it may call functions of Python
    sys.settrace(stop)
    try:
        value = read()
    except Exception:  # freed by backward, overwritten in place, or packed
        value = None
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return packed or value


def _collect(value: Any, tensor_class: type, found: list[Any], depth: int = 0) -> None:
    if isinstance(value, tensor_class):
        found.append(value)
    elif depth < _MANY_DEEP and type(value) in (list, tuple):
        for item in value:
            _collect(item, tensor_class, found, depth + 1)
    elif depth < _MANY_DEEP and type(value) is dict:
        for item in value.values():
            _collect(item, tensor_class, found, depth + 1)


def find_gathered(thing: Any) -> tuple[Any, Any] | None:
    """Return the module and the whole parameter of a record of `fully_shard`; `None` for anything else."""
    if type(thing).__name__ != "FSDPParam":
        return None
    with suppress(AttributeError):  # before the first gather
        return thing._module_info.module, thing._unsharded_param
    return None


def read_local(tensor: Any) -> Any:
    """Return this rank's part of a `DTensor`, and any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def is_part(tensor: Any) -> bool:
    """Return whether a tensor is a `DTensor`."""
    return type(tensor).__name__ == "DTensor"


def is_built(module: Any) -> bool:
    """Return whether a module's constructor has begun; before that, its attributes cannot be read."""
    return bool({"_parameters", "_modules"} <= vars(module).keys())


def read_fields(module: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a module's own parameters, buffers and modules; one under construction may have none yet."""
    fields = vars(module)
    return fields.get("_parameters", {}), fields.get("_buffers", {}), fields.get("_modules", {})
