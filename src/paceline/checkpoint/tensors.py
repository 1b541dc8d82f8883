"""Named tensors as one safetensors file, written and hashed in one pass.

The file is plain safetensors (an 8-byte length, a JSON header, the bytes; see
https://github.com/huggingface/safetensors#format), and the safetensors library reads it. It is written here
rather than by the library for three reasons: tensors are copied from their device and hashed one by one, so
that a save needs memory for one tensor and never reads the disk; every write goes through `files.py`; and
complex128 can be stored.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import safetensors
import torch

from paceline.checkpoint.hashed import FileRecord, HashedFile
from paceline.checkpoint.part import Part
from paceline.errors import PacelineError

# The names of the format; the quantized types have none. Neither has complex128, whose name is ours: the file
# has such tensors as F64 with a last dimension of 2, and their names in the header's `__metadata__.complex`.
_PAIRS, _PAIR = "C128", "F64"
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.complex128: _PAIRS,
    torch.complex64: "C64",
    torch.float64: _PAIR,
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

assert sys.byteorder == "little", "safetensors is little-endian, and so is all that torch runs on"


def torch_dtype(name: str) -> torch.dtype:
    """Return the type that the format calls `name`.

    Raises:
        UnreadableTensorsError: no Paceline writes such tensors.
    """
    if name not in _DTYPES:
        raise UnreadableTensorsError(f"a tensor of type {name}")
    return _DTYPES[name]


def refuse_unstorable(path: str, tensor: torch.Tensor) -> None:
    """Raise PL507 for a tensor that cannot be stored.

    Args:
        path: to it, for the message.
    """
    reason = why_not_storable(tensor)
    if reason is not None:
        raise PacelineError(
            "PL507",
            saw=f"{path} {reason}.",
            rule="A checkpoint holds dense, plain tensors with values.",
            fix="Convert it, or register it as non-persistent so that state_dict() leaves it out.",
        )


def why_not_storable(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be stored, as the end of a sentence, or `None` if it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, not a plain tensor"
    if tensor.layout != torch.strided:
        return f"is a tensor of layout {tensor.layout}, not a dense one"
    if tensor.device.type == "meta":
        return "is a tensor on the meta device, so it has no values"
    if tensor.dtype not in DTYPE_NAMES:
        return f"is a tensor of {tensor.dtype}, which safetensors does not support"
    return None


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's values in row-major order, copied from its device if that is not the CPU."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def find_aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names that share the memory of an earlier name's tensor, with that name.

    "Earlier" is in name order, so that the answer does not depend on the order of the dict.
    """
    by_address: dict[int, list[str]] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.numel():  # All empty ones have address 0.
            by_address.setdefault(tensor.data_ptr(), []).append(name)
    aliases: dict[str, str] = {}
    for names in by_address.values():
        if len(names) == 1:
            continue
        first: dict[tuple[Any, ...], str] = {}
        for name in names:
            tensor = tensors[name]
            signs = tensor.is_conj(), tensor.is_neg()
            key = (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), signs)
            kept = first.setdefault(key, name)
            if kept != name:
                aliases[name] = kept
    return aliases


@dataclass(frozen=True)
class FilePlan:
    """A file that has not been written: bytes and tensors that follow each other.

    Attributes:
        pieces: its content; tensors are stored by their values in row-major order.
    """

    name: str
    pieces: tuple[bytes | torch.Tensor, ...]

    @cached_property
    def num_bytes(self) -> int:
        """Size of the file."""
        return sum(piece_bytes(piece) for piece in self.pieces)

    def write(self, folder: Path) -> FileRecord:
        """Write the file into `folder`, durable on return; nothing of its name may be there yet."""
        with HashedFile(folder / self.name) as file:
            for piece in self.pieces:
                file.write(piece if isinstance(piece, bytes) else tensor_bytes(piece))
        return file.record


def piece_bytes(piece: bytes | torch.Tensor) -> int:
    """Return the number of bytes that a piece takes in a file."""
    return len(piece) if isinstance(piece, bytes) else piece.numel() * piece.element_size()


def plan_tensors(
    name: str, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None
) -> FilePlan:
    """Plan a safetensors file.

    Args:
        tensors: each fit to be stored (`why_not_storable`), of any device.
    """
    begin, order = _plan_header(
        tuple((name, each.dtype, each.shape) for name, each in tensors.items()),
        tuple((metadata or {}).items()),
    )
    return FilePlan(name, (begin, *(tensors[each] for each in order)))


def plan_json(name: str, structure: Any) -> FilePlan:
    """Plan a file of JSON."""
    # Without indentation: with it, Python's encoder in C is not used, and a save waits for this.
    return FilePlan(name, ((json.dumps(structure, allow_nan=False) + "\n").encode(),))


def stream_tensors(
    path: Path,
    infos: Mapping[str, TensorInfo],
    metadata: Mapping[str, str],
    read: Callable[[str], Iterable[memoryview]],
) -> FileRecord:
    """Write a new safetensors file from bytes that are read as they are needed, durable on return.

    Args:
        path: where; nothing may be there yet.
        infos: types and shapes by name.
        read: from a name to the bytes of its tensor, in row-major order.
    """
    begin, order = _dump_header(infos, metadata)
    with HashedFile(path) as file:
        file.write(begin)
        for name in order:
            for data in read(name):
                file.write(data)
    return file.record


@lru_cache(maxsize=8)  # training waits for the plans of a save, and most saves have the same tensors
def _plan_header(
    forms: tuple[tuple[str, torch.dtype, torch.Size], ...], metadata: tuple[tuple[str, str], ...]
) -> tuple[bytes, tuple[str, ...]]:
    """Return the result of `_dump_header` for names, types and shapes."""
    infos = {name: TensorInfo(DTYPE_NAMES[dtype], tuple(shape)) for name, dtype, shape in forms}
    begin, order = _dump_header(infos, dict(metadata))
    return begin, tuple(order)


def _dump_header(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return the bytes before the first tensor, and the names in the order of their values."""
    # Widest types first keeps every tensor aligned to its type, as the library orders them too.
    stored = sorted(infos, key=lambda name: (-infos[name].dtype_bytes, name))
    pairs = [name for name in stored if infos[name].dtype == _PAIRS]
    named = {"complex": json.dumps(pairs)} if pairs else {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **named, **metadata}}
    end = 0
    for name in stored:
        info = infos[name]
        start, end = end, end + info.num_elements * info.dtype_bytes
        dtype, shape = (_PAIR, [*info.shape, 2]) if info.dtype == _PAIRS else (info.dtype, list(info.shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Pairs are read in place as complex numbers, which processors load from multiples of 16 bytes alone.
    text += b" " * (-(8 + len(text)) % (16 if pairs else 8))
    return len(text).to_bytes(8, "little") + text, stored


class UnreadableTensorsError(ValueError):
    """The error of a file that is not safetensors, or of files that do not match each other.

    Attributes:
        file: its name, where it is one file's fault.
    """

    def __init__(self, reason: str, *, file: str = "") -> None:
        super().__init__(reason)
        self.file = file


@dataclass(frozen=True)
class TensorInfo:
    """The type, shape and alias of one tensor, from a file's header.

    Attributes:
        dtype: in the words of the format, `"F32"`.
        shape: its shape.
        alias_of: the name under which its values are stored, where that is another one.
    """

    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None

    @property
    def num_elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one number."""
        return torch_dtype(self.dtype).itemsize


class _File:
    """An open safetensors file; complex128 tensors are read from their pairs of numbers."""

    def __init__(self, path: Path) -> None:
        opened: Any = safetensors.safe_open(path, framework="pt")
        self._file = opened
        self.metadata: dict[str, str] = opened.metadata() or {}
        self.keys: list[str] = list(opened.keys())
        self._pairs = frozenset(json.loads(self.metadata.get("complex", "[]")))

    def get_tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._file.get_tensor(name)
        return torch.view_as_complex(found) if name in self._pairs else found

    def get_slice(self, name: str) -> Any:
        found = self._file.get_slice(name)
        return _Pairs(found) if name in self._pairs else found


class _Pairs:
    """A slice of a file's pairs of numbers, as one of complex numbers."""

    def __init__(self, pairs: Any) -> None:
        self._pairs = pairs

    def get_dtype(self) -> str:
        return _PAIRS

    def get_shape(self) -> list[int]:
        shape: list[int] = self._pairs.get_shape()
        return shape[:-1]

    def __getitem__(self, place: Any) -> torch.Tensor:
        return torch.view_as_complex(self._pairs[place].contiguous())


class OpenFiles:
    """Safetensors files held open, so that each header is parsed once however many tensors are read."""

    def __init__(self) -> None:
        self._files: dict[Path, _File] = {}

    def open(self, path: Path) -> _File:
        """Return an open file."""
        if path not in self._files:
            self._files[path] = _File(path)
        return self._files[path]


def find_nan(path: Path, names: Collection[str]) -> str:
    """Return the first of some tensors of a safetensors file that has a NaN, or ""."""
    with _opened(path) as file:
        for name in sorted(set(file.keys).intersection(names)):
            values = file.get_tensor(name)
            if (values.float() if values.itemsize == 1 else values).isnan().any():
                return name
    return ""


def read_into(
    path: Path, name: str, source: Part, wanted: Part, found: torch.Tensor, files: OpenFiles
) -> None:
    """Read the elements of a part that one tensor of a safetensors file contains.

    Args:
        source: the part of the whole that the tensor is.
        found: its values, filled in where the tensor has them.

    Raises:
        UnreadableTensorsError: the file is not such a file, or lacks the tensor.
    """
    with _opened(path, files) as file:
        if source == wanted:
            found.copy_(file.get_tensor(name))
        else:
            copy_blocks(source, file.get_slice(name), wanted, found)


def copy_blocks(source: Part, values: Any, wanted: Part, found: torch.Tensor) -> None:
    """Copy the elements that one part shares with another.

    Args:
        values: of it: a tensor, or a slice of a file.
        found: its values, to be filled in.
    """
    for here, there in wanted.overlap(source):
        found[here] = values[there]


@contextlib.contextmanager
def _opened(path: Path, files: OpenFiles | None = None) -> Iterator[_File]:
    try:
        yield (files or OpenFiles()).open(path)
    except (
        OSError,
        ValueError,
        IndexError,
        RuntimeError,
        RecursionError,
        safetensors.SafetensorError,
    ) as error:
        raise UnreadableTensorsError(f"{path.name}: {error}", file=path.name) from None


def read_infos(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors in the header of a safetensors file, in name order, without reading them.

    Raises:
        UnreadableTensorsError: it is not such a file.
    """
    return read_header(path)[0]


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors in a header, and the header's metadata."""
    infos: dict[str, TensorInfo] = {}
    with _opened(path) as file:
        metadata = file.metadata
        for name in file.keys:
            part = file.get_slice(name)
            infos[name] = TensorInfo(str(part.get_dtype()), tuple(part.get_shape()))
    return dict(sorted(infos.items())), metadata
