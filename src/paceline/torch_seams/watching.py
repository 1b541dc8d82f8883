"""Inspects torch in a watched rank; imports nothing of torch, because the script may not have done so yet.

The watch must not end a healthy script, so a missing name turns off a part of the watch. The table lists
which part.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, ModuleType
from typing import Any

# The Flight Recorder's two sources; records carry the index of their source.
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
_INDUCTOR = "_inductor"
_MANY_FRAMES = 16
BUFFER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The variables with the Flight Recorder's number of entries; torch reads them with the first group."""


def find_world() -> Any | None:
    """Return c10d's record of the groups of this process, or None before c10d is imported."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return getattr(c10d, "_world", None)


def find_group_class() -> Any | None:
    """Return the class of all process groups, or None before c10d is imported."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    return getattr(c10d, "ProcessGroup", None)


def list_dumps() -> list[tuple[int, Any]]:
    """Return the functions that return the Flight Recorder's records, each with its source's number."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    found = [(source, getattr(c10d, name, None)) for source, name in enumerate(_DUMPS)]
    return [(source, dump) for source, dump in found if dump is not None]


@contextmanager
def without_inductor() -> Iterator[None]:
    """Keep torch from importing its compiler (seconds) to search it for frames of compiled code.

    Inside, `torch._inductor` is a module that lacks only `codecache`, unless the script has imported it.
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
    """A module that is imported when other code than the recorder uses it."""

    def __getattr__(self, name: str) -> Any:
        if name == "codecache":
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def hide_from_compiler(torch: Any, *functions: Callable[..., Any]) -> None:
    """Exclude Paceline's functions, and those that they call, from torch.compile in the script's code.

    Does nothing if this torch names it differently: the functions may then be compiled as separate frames.
    """
    with suppress(AttributeError):
        compiler = torch._C._dynamo.eval_frame
        skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
        for function in functions:
            compiler.set_code_exec_strategy(function.__code__, skip)


def call_after_backward(torch: Any, call: Callable[[], None]) -> None:
    """Call a function when the current backward pass ends."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def find_backward_number(torch: Any) -> Callable[[], int]:
    """Return the function that returns the number of the current backward pass, -1 for none."""
    found: Callable[[], int] = torch._C._current_graph_task_id
    return found


def count_writes(tensor: Any) -> int:
    """Return the number of in-place writes to a tensor."""
    return int(tensor._version)


def read_values(sparse: Any) -> Any:
    """Return the stored numbers of a sparse tensor, including duplicates."""
    return sparse._values()


def find_sharded_module(frame: FrameType | None) -> str:
    """Return the module for whose parameters FSDP calls a collective; empty for other callers.

    Args:
        frame: that calls it.
    """
    for _ in range(_MANY_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_filename.endswith("/_fsdp_param_group.py"):
            return str(frame.f_locals["self"]._with_fqn("").strip(" ()"))
        frame = frame.f_back
    return ""


def count_microbatches(schedule: Any = None) -> int:
    """Return the number of microbatches of a schedule of torch's pipelines; 0 if it has no such number.

    Without a schedule: the number of all that this process has; 0 if it has none, or if they differ.
    """
    if schedule is not None:
        return int(getattr(schedule, "_n_microbatches", 0))
    kind: Any = getattr(sys.modules.get("torch.distributed.pipelining.schedules"), "_PipelineSchedule", None)
    all_objects = gc.get_objects() if kind is not None else []
    counts = {count_microbatches(thing) for thing in all_objects if issubclass(type(thing), kind)}
    return counts.pop() if len(counts) == 1 else 0


def list_reduced_names() -> list[list[str]]:
    """Return the names of the parameters that each DDP module of this process reduces, in its order."""
    kind = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    models = [thing for thing in gc.get_objects() if kind is not None and type(thing) is kind]
    return [
        [
            name
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        ]
        for model in models
    ]
