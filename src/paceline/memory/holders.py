"""Searches the variables of running functions for tensors and arrays, and names the variable that holds each.

Reading a frame's variables makes Python keep a copy of them as long as the frame lives (before Python 3.13).
Such a copy would keep a step's activations alive, so it is emptied afterwards.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

from paceline.own_code import describe_place, is_own

# How deep to look into containers and objects, and how many objects to look at in all.
_DEPTH = 4
_MOST = 200_000
# Smaller arrays and strings are of no interest.
_LARGE = 1 << 20
_PLAIN = (int, float, complex, bool, type(None), type, ModuleType, FunctionType, MethodType)
_OF_LIBRARIES = ("torch", "numpy", "builtins", "threading", "logging", "paceline")


@dataclass(frozen=True)
class Variable:
    """A variable of a running function.

    Attributes:
        name: with the attribute that holds the value, such as `self.history`.
        place: `train.py:31 in evaluate`.
        is_container: whether the value is in a list or another container.
        is_own: whether the function is the user's.
        module: the name of the module in whose forward the function runs; `None` outside of all.
    """

    name: str
    place: str
    is_container: bool
    is_own: bool
    module: str | None = None


def list_frames(frame: FrameType | None, trace: TracebackType | None = None) -> list[FrameType]:
    """Return the frames of an exception and of a stack, innermost first, each once."""
    frames: list[FrameType] = []
    while trace is not None:
        frames.insert(0, trace.tb_frame)
        trace = trace.tb_next
    known = {id(one) for one in frames}
    while frame is not None:
        if id(frame) not in known:
            frames.append(frame)
        frame = frame.f_back
    return frames


def describe_frame(frame: FrameType) -> str:
    """Return a frame's place."""
    code = frame.f_code
    return describe_place(code.co_filename, frame.f_lineno, code.co_name)


def find_place(frames: Iterable[FrameType]) -> str:
    """Return the place of the innermost frame that is the user's."""
    for frame in frames:
        if is_own(frame.f_code.co_filename):
            return describe_frame(frame)
    return ""


def read_variables(frame: FrameType) -> dict[str, Any]:
    """Return a frame's variables, and leave no copy of them behind."""
    found = frame.f_locals
    variables = dict(found)
    is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_function and type(found) is dict and frame.f_trace is None:
        found.clear()
    return variables


def find_held(
    frames: Iterable[tuple[FrameType, str | None]],
    is_tensor: Callable[[Any], bool],
    is_opaque: Callable[[Any], bool],
) -> Iterator[tuple[Any, Variable]]:
    """Yield the tensors and large arrays that variables hold, each once, with the variable.

    Args:
        frames: innermost first, each with the module in whose forward it runs. A tensor belongs to the first
            variable that leads to it. Variables of the user's functions come before those of libraries, and
            those outside of modules before those inside.
        is_tensor: whether a value is a tensor.
        is_opaque: whether not to look into an object.
    """
    seen: set[int] = set()
    for frame, module in sorted(
        frames, key=lambda pair: (not is_own(pair[0].f_code.co_filename), pair[1] is not None)
    ):
        own = is_own(frame.f_code.co_filename)
        place = describe_frame(frame)
        todo: deque[tuple[Any, str, int, bool]] = deque(
            (value, name, 0, False) for name, value in read_variables(frame).items()
        )
        while todo and len(seen) < _MOST:
            value, name, depth, inside = todo.popleft()
            if isinstance(value, _PLAIN) or id(value) in seen:
                continue
            seen.add(id(value))
            if is_tensor(value) or (count_bytes(value) or 0) >= _LARGE:
                yield value, Variable(name, place, inside, own, module)
            elif depth < _DEPTH and not is_opaque(value):
                todo.extend(_open(value, name, depth + 1, inside))


def count_bytes(value: Any) -> int | None:
    """Return the bytes of an array or a string that owns them; `None` for anything else."""
    kind = type(value)
    if kind in (bytes, bytearray, str):
        return sys.getsizeof(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("ndarray", "memmap"):
        with suppress(Exception):
            return int(value.nbytes) if value.base is None and kind.__name__ == "ndarray" else 0
    return None


def _open(value: Any, name: str, depth: int, inside: bool) -> Iterator[tuple[Any, str, int, bool]]:
    kind = type(value)
    with suppress(Exception):  # a container that changes, an object with unusual attributes
        if kind is dict or isinstance(value, dict):
            # The variables of a module are an outer frame's, or a library's.
            for item in list(value.values()):
                yield item, name, depth, True
        elif isinstance(value, list | tuple | set | frozenset | deque):
            for item in list(value):
                yield item, name, depth, True
        elif kind.__module__.partition(".")[0] not in _OF_LIBRARIES or _is_data(value):
            for key, item in list(vars(value).items()):
                yield item, f"{name}.{key}", depth, inside


def _is_data(value: Any) -> bool:
    """Return whether an object of a library holds data: a loader or a data set."""
    return type(value).__module__.startswith(("torch.utils.data", "paceline.data"))
