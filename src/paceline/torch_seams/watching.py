"""Look into torch from a rank that is watched. Import nothing of torch: the script may not have done so yet.

The watch must not end a healthy script, so a name that a torch lacks turns a part of the watch off. The table
says which part.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

# The Flight Recorder's two sources; a record is known by the number of its source.
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
_INDUCTOR = "_inductor"


def find_world() -> Any | None:
    """Return c10d's record of the groups of this process, or None before c10d is imported."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return getattr(c10d, "_world", None)


def find_group_class() -> Any | None:
    """Return the class of all process groups, or None before c10d is imported."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    return getattr(c10d, "ProcessGroup", None)


def list_dumps() -> list[tuple[int, Any]]:
    """Return the functions that give the Flight Recorder's records, each with the number of its source."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    found = [(source, getattr(c10d, name, None)) for source, name in enumerate(_DUMPS)]
    return [(source, dump) for source, dump in found if dump is not None]


@contextmanager
def without_inductor() -> Iterator[None]:
    """Keep torch from importing its compiler, which takes seconds, to ask it for frames of compiled code.

    Meanwhile `torch._inductor` is a module that lacks `codecache` alone, unless the script has imported it.
    """
    torch = sys.modules["torch"]
    if f"torch.{_INDUCTOR}" in sys.modules:
        yield
        return
    torch.__dict__[_INDUCTOR] = _LaterModule(f"torch.{_INDUCTOR}")
    try:
        yield
    finally:
        if isinstance(torch.__dict__.get(_INDUCTOR), _LaterModule):
            del torch.__dict__[_INDUCTOR]


class _LaterModule(ModuleType):
    """A module that is imported when somebody else than the recorder wants something of it."""

    def __getattr__(self, name: str) -> Any:
        if name == "codecache":
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def hide_from_compiler(torch: Any, *functions: Callable[..., Any]) -> None:
    """Keep torch.compile out of functions of ours, and what they call, that the script's own code calls.

    Does nothing on a torch that has other words for it: then they may be compiled as frames of their own.
    """
    with suppress(AttributeError):
        compiler = torch._C._dynamo.eval_frame
        skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
        for function in functions:
            compiler.set_code_exec_strategy(function.__code__, skip)


def call_after_backward(torch: Any, call: Callable[[], None]) -> None:
    """Have a function called when the backward pass under way is through."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def find_backward_number(torch: Any) -> Callable[[], int]:
    """Return the function that gives the number of the backward pass under way, -1 for none."""
    found: Callable[[], int] = torch._C._current_graph_task_id
    return found


def count_writes(tensor: Any) -> int:
    """Return how often a tensor was written to in place."""
    return int(tensor._version)


def read_values(sparse: Any) -> Any:
    """Return the numbers of a sparse tensor as they are, duplicates included."""
    return sparse._values()


def read_module(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's own parameters and modules; one that is being made may have none yet."""
    fields = vars(module)
    return fields.get("_parameters", {}), fields.get("_modules", {})
