"""Takes samples of tensors' numbers without waiting for their device."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

# Per tensor; enough, because one step of an optimizer changes all of them.
_NUM_VALUES = 8
_MOST_ROWS = 32
_PER_ROW = 64
_LEAST_PER_ROW = 8


class Sample:
    """Numbers of a tensor, which arrive later if it is on a GPU.

    Args:
        tensor: small.
        read: makes JSON-able values of it, once it is in this process's memory.
    """

    def __init__(self, torch: Any, tensor: Any, read: Callable[[Any], Any]) -> None:
        self._read = read
        self._event: Any = None
        self._value: Any = None
        self._tensor: Any = None
        if tensor.is_cpu:
            self._value = read(tensor)
        elif tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_here(self) -> bool:
        """Whether `value` is final."""
        if self._event is not None and self._event.query():
            self._value, self._event, self._tensor = self._read(self._tensor), None, None
        return self._event is None

    @property
    def value(self) -> Any:
        """The values; None if they have not arrived, or are on a device that cannot be read."""
        return self._value if self.is_here else None


def take_sample(torch: Any, tensors: Iterable[Any]) -> Sample:
    """Return a few numbers of each tensor, as one list."""
    parts = []
    for tensor in tensors:
        flat = _flatten(tensor.detach())
        if flat is not None:
            step = max(1, flat.numel() // _NUM_VALUES)
            parts.append(flat[: step * _NUM_VALUES : step])
    if not parts:
        return Sample(torch, torch.empty(0), lambda found: [])
    return Sample(torch, parts[0].double() if len(parts) == 1 else torch.cat(parts).double(), _to_list)


def hash_rows(torch: Any, tensor: Any, others: str) -> Sample | None:
    """Return a hash of each sample of a batch (its first dimension), together with the other arguments."""
    if tensor.dim() < 1 or not len(tensor) or tensor[0].numel() < _LEAST_PER_ROW:
        return None
    flat = tensor.detach()[:_MOST_ROWS].flatten(1)
    part = flat[:, :: max(1, flat.shape[1] // _PER_ROW)][:, :_PER_ROW].contiguous()
    start = zlib.crc32(others.encode())
    return Sample(
        torch, part, lambda found: [zlib.crc32(row.tobytes(), start) for row in _to_bytes(torch, found)]
    )


def _to_list(tensor: Any) -> list[float]:
    return tensor.tolist()  # type: ignore[no-any-return]


def _to_bytes(torch: Any, tensor: Any) -> Any:
    return tensor.view(torch.uint8).numpy()


def _flatten(tensor: Any) -> Any | None:
    """Return a tensor's numbers in the order of its memory, without copying; None if they have gaps."""
    if tensor.is_sparse or not tensor.numel():
        return None
    if tensor.is_contiguous():
        return tensor.view(-1)
    dense = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in dense:
        if size > 1 and stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))
