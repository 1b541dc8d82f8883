"""Searches the installed torch for private names, and refuses a torch that lacks them.

torch is imported only when a name is looked up.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from paceline.errors import PacelineError
from paceline.torch_seams.table import NAMES, TorchName

_ABSENT = object()


def has_name(path: str) -> bool:
    """Return whether the installed torch has a name, given as a dotted path.

    The last part may also be an attribute of a class's instances: one that the class declares, or that its
    methods use.
    """
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    for number, part in enumerate(rest, start=1):
        owner, found = found, getattr(found, part, _ABSENT)
        # torch.distributed.rendezvous is a function, and the module that it comes from.
        is_hidden = isinstance(found, FunctionType) and number < len(rest)
        if (found is _ABSENT or is_hidden) and isinstance(owner, ModuleType):
            try:
                found = importlib.import_module(".".join([first, *rest[:number]]))
            except ImportError:
                return False
        if found is _ABSENT:
            return number == len(rest) and isinstance(owner, type) and _instances_have(owner, part)
    return True


def find_missing(names: Iterable[TorchName]) -> list[TorchName]:
    """Return the names that the installed torch lacks; a name with alternatives needs one of them."""
    return [name for name in names if not any(map(has_name, name.paths))]


def require(topic: str) -> None:
    """Check that the installed torch has all names in one part of the table that have no fallback."""
    missing = find_missing(name for name in NAMES[topic] if not name.fallback)
    if missing:
        raise missing_names_error([f"{' or '.join(name.paths)} ({name.use})" for name in missing])


@contextmanager
def checked(topic: str) -> Iterator[None]:
    """Check names before the imports inside the context, which would raise an ImportError for one."""
    require(topic)
    yield


def set_existing(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a torch object; it must exist already, because torch would not read a new one."""
    if not hasattr(owner, name):
        kind = owner if isinstance(owner, type) else type(owner)
        raise missing_names_error([f"{kind.__module__}.{kind.__qualname__}.{name}"])
    setattr(owner, name, value)


def missing_names_error(missing: list[str]) -> PacelineError:
    """Return the error for a torch that lacks names."""
    version = importlib.import_module("torch").__version__
    return PacelineError(
        "PL396",
        saw=f"torch {version} has no {', no '.join(missing)}.",
        rule="Paceline uses these names of torch, which torch may change in any version. It is tested with "
        "torch 2.11, 2.12 and 2.13.",
        fix="Install one of these versions of torch, or a newer Paceline.",
    )


def _instances_have(kind: type, name: str) -> bool:
    for base in kind.__mro__:
        if name in getattr(base, "__annotations__", {}):
            return True
        for value in vars(base).values():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType) and name in function.__code__.co_names:
                return True
    return False
