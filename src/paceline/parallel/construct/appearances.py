"""Makes tensors on the meta device appear to Python code as tensors on the CPU.

A function mode of torch handles what no dispatch mode sees. A recorded tensor reports that it is on the CPU,
because torch.nn.init and transformers skip tensors on the meta device. Code that reads Python data into a
tensor, or a tensor into Python, goes through the recorder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.parallel.construct.mode import BUILT, CPU, META, FactoryRecorder, unseen, where
from paceline.torch_seams.dispatch import without_functions
from paceline.torch_seams.modules import replaced_truncated_normal
from paceline.torch_seams.operators import parse_to
from paceline.torch_seams.tensors import is_pickling
from paceline.torch_seams.trees import tree_map


class Appearances(TorchFunctionMode):
    """The function mode that presents recorded tensors as tensors on the CPU.

    Args:
        recorder: knows which tensors are recorded.
    """

    def __init__(self, recorder: FactoryRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = f"{getattr(func.__self__, '__name__', '')}.{name}"
        if func is torch.tensor:
            return _make_tensor(self._recorder, func, args, kwargs)
        handler = _APPEARANCES.get(name)
        if handler is None or not args or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        with without_functions():
            known = self._recorder.knows(args[0])
        return handler(self._recorder, func, args, kwargs) if known else func(*args, **kwargs)


def _get_device(recorder: FactoryRecorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    # Pickle would read the bytes of a CPU tensor. Given the true device, it makes a tensor that is refused.
    return META if is_pickling(sys._getframe(2)) else CPU


def _get_false(recorder: FactoryRecorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return False


def _get_true(recorder: FactoryRecorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return True


def _get_address(recorder: FactoryRecorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> int:
    with without_functions():
        window = recorder.window(args[0])
    return (window.storage + 1 << 44) + window.offset * window.dtype.itemsize


def _set_data(recorder: FactoryRecorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    with unseen():
        if isinstance(args[1], Tensor) and args[1].device.type != "meta":
            args = (args[0], recorder.adopt(args[1]))
    return func(*args, **kwargs)


def _read_value(recorder: FactoryRecorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    with unseen():
        value = recorder.value(args[0], f"{func.__name__}()")
        return func(value, *args[1:], **kwargs)


def _move(recorder: FactoryRecorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Handle `.to` and `.cpu`: a move to the CPU, where the tensor reports that it is, copies nothing."""
    tensor = args[0]
    if kwargs.get("copy"):
        return func(*args, **kwargs)
    try:
        device, dtype, _, memory_format = (
            (CPU, None, False, kwargs.get("memory_format"))
            if func.__name__ == "cpu"
            else parse_to(*args[1:], **{k: v for k, v in kwargs.items() if k != "copy"})
        )
    except (TypeError, RuntimeError):  # a positional copy=
        return func(*args, **kwargs)
    if device is None or device.type not in ("cpu", "meta"):
        return func(*args, **kwargs)
    wanted = torch.preserve_format if memory_format is None else memory_format
    return tensor.to(tensor.dtype if dtype is None else dtype, memory_format=wanted)


def _format(recorder: FactoryRecorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return _read_value(recorder, func, args, kwargs) if args[0].dim() == 0 else func(*args, **kwargs)


def _make_tensor(recorder: FactoryRecorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Handle `torch.tensor`, which reads the values of tensors in a list unseen by any dispatch mode."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "meta tensor" not in str(error) or recorder.refused is not None:
            raise

    def read(leaf: Any) -> Any:
        with unseen():
            known = isinstance(leaf, Tensor) and recorder.knows(leaf)
            return recorder.value(leaf, "torch.tensor()").tolist() if known else leaf

    return func(tree_map(read, args[0]), *args[1:], **kwargs)


def _refuse_python(recorder: FactoryRecorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    recorder.refuse(
        "PL456",
        saw=f"{where()} calls {func.__name__}, which runs a Python function on every element.",
        rule="Elements have no values while a factory runs on the meta device.",
        fix=f"Use operations of torch in place of the function. {BUILT}",
    )


def _new_tensor(recorder: FactoryRecorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs})


def _index(recorder: FactoryRecorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Convert lists in an index on the CPU; torch would make them meta tensors without numbers."""

    def convert(index: Any) -> Any:
        if isinstance(index, (list, range)) and all(isinstance(i, (int, list, np.integer)) for i in index):
            if len(index) == 0:
                return torch.tensor([], dtype=torch.long)
            return torch.tensor(list(index))
        return torch.from_numpy(index) if isinstance(index, np.ndarray) else index

    index = tuple(map(convert, args[1])) if isinstance(args[1], tuple) else convert(args[1])
    return func(args[0], index, *args[2:], **kwargs)


_APPEARANCES: dict[str, Callable[[FactoryRecorder, Any, tuple[Any, ...], Any], Any]] = {
    "device.__get__": _get_device,
    "is_meta.__get__": _get_false,
    "is_cpu.__get__": _get_true,
    "data.__set__": _set_data,
    "data_ptr": _get_address,
    "apply_": _refuse_python,
    "map_": _refuse_python,
    "map2_": _refuse_python,
    "cpu": _move,
    "to": _move,
    "tolist": _read_value,
    "__format__": _format,
    "numpy": _read_value,
    "__array__": _read_value,
    "new_tensor": _new_tensor,
    "__getitem__": _index,
    "__setitem__": _index,
}


@contextmanager
def recording() -> Iterator[FactoryRecorder]:
    """Run everything inside the context on the meta device, and record it."""
    recorder = FactoryRecorder()

    def as_one_operation(truncated: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda tensor, *args, **kwargs: recorder.call_whole(truncated, tensor, *args, **kwargs)

    try:
        # It redraws until all values are inside its bounds, which depends on data, so it is recorded as one
        # call.
        with replaced_truncated_normal(as_one_operation), Appearances(recorder), recorder:
            yield recorder
    finally:
        recorder.put_back_generators()
