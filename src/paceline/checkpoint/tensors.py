"""Named tensors as one safetensors file, written and hashed in one pass.

The file is plain safetensors (an 8-byte length, a JSON header, the bytes; see
https://github.com/huggingface/safetensors#format), and the safetensors library reads it. It is written
here and not by the library for three reasons: tensors are copied from their device and hashed one by
one, so that a save needs memory for one tensor and never reads the disk; every write passes `files.py`;
and tensors that are one and the same are stored once, with the other names in the header's
`__metadata__.aliases`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from paceline.checkpoint import files

# The names of the format; complex128 and the quantized types have none.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
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

assert sys.byteorder == "little", "safetensors is little-endian, and so is all that torch runs on"


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says about one file.

    Attributes:
        num_bytes: its size.
        sha256: hash of its bytes, in hex.
    """

    num_bytes: int
    sha256: str


class HashedFile:
    """A durable new file that hashes what is written to it; `record` is there after the block."""

    def __init__(self, path: Path) -> None:
        self._file = files.DurableFile(path)
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def __enter__(self) -> HashedFile:
        self._file.__enter__()
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Writes and hashes all of `data`."""
        self._file.write(data)
        self._hash.update(data)
        self._num_bytes += len(data)

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    @property
    def record(self) -> FileRecord:
        """Size and hash of what was written."""
        return FileRecord(self._num_bytes, self._hash.hexdigest())


def why_not_storable(tensor: torch.Tensor) -> str | None:
    """Why a tensor can't go into a checkpoint, as the end of a sentence, or `None` where it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, not a plain tensor"
    if tensor.layout != torch.strided:
        return f"is a tensor of layout {tensor.layout}, not a dense one"
    if tensor.device.type == "meta":
        return "is a tensor on the meta device, so it has no values"
    if tensor.dtype not in DTYPE_NAMES:
        return f"is a tensor of {tensor.dtype}, which safetensors has no name for"
    return None


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's values in row-major order, copied from its device where it is not on the CPU."""
    flat = tensor.detach().cpu().resolve_neg().contiguous().reshape(-1)
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def find_aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names whose tensor is the very same memory as that of an earlier name, with that name.

    "Earlier" is in name order, so that the answer doesn't depend on the order of the dict.
    """
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.numel() == 0:  # all of these have address 0
            continue
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        kept = first.setdefault((*where, tensor.is_neg()), name)
        if kept != name:
            aliases[name] = kept
    return aliases


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], *, keep_aliases: bool = True
) -> FileRecord:
    """Writes a new safetensors file, durable on return.

    Args:
        path: where; nothing may be there yet.
        tensors: each fit to be stored (`why_not_storable`), of any device.
        keep_aliases: store tied tensors once, with the other names in the metadata. Without it every
            name gets its own bytes, which is what other readers expect.

    Returns:
        Size and hash of the file.
    """
    aliases = find_aliases(tensors) if keep_aliases else {}
    metadata = {"format": "pt"}
    if aliases:
        metadata["aliases"] = json.dumps(aliases, sort_keys=True)
    # Widest types first keeps every tensor aligned to its type, as the library orders them too.
    stored = sorted(tensors.keys() - aliases.keys(), key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in stored:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in stored:
            file.write(tensor_bytes(tensors[name]))
    return file.record


class UnreadableTensorsError(ValueError):
    """A file that is not safetensors, or whose aliases don't fit its tensors."""


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, on the CPU; aliases come back as the tensor they stand for.

    Raises:
        UnreadableTensorsError: it is not such a file.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            # Cloned, because the library's tensors are the mapped file: cutting that file would kill us.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            aliases = _read_aliases(file.metadata(), tensors)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UnreadableTensorsError(f"{path.name}: {error}") from None
    return tensors | {name: tensors[kept] for name, kept in aliases.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says about one tensor.

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
        """How many numbers it has."""
        product = 1
        for size in self.shape:
            product *= size
        return product


def read_infos(path: Path) -> dict[str, TensorInfo]:
    """What the header of a safetensors file says, in name order, without reading the tensors.

    Raises:
        UnreadableTensorsError: it is not such a file.
    """
    infos: dict[str, TensorInfo] = {}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                infos[name] = TensorInfo(str(part.get_dtype()), tuple(part.get_shape()))
            aliases = _read_aliases(file.metadata(), infos)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UnreadableTensorsError(f"{path.name}: {error}") from None
    for name, kept in aliases.items():
        infos[name] = TensorInfo(infos[kept].dtype, infos[kept].shape, alias_of=kept)
    return dict(sorted(infos.items()))


def _read_aliases(metadata: Mapping[str, str] | None, stored: Iterable[str]) -> dict[str, str]:
    aliases = json.loads((metadata or {}).get("aliases", "{}"))
    names = list(stored)
    if not isinstance(aliases, dict) or any(
        name in names or kept not in names for name, kept in aliases.items()
    ):
        raise ValueError("its aliases don't fit its tensors")
    return aliases


def hash_file(path: Path) -> FileRecord:
    """Size and hash of a file, read in chunks."""
    digest, num_bytes = hashlib.sha256(), 0
    for chunk in _chunks(path):
        digest.update(chunk)
        num_bytes += len(chunk)
    return FileRecord(num_bytes, digest.hexdigest())


def _chunks(path: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(files.CHUNK_BYTES))
    with open(path, "rb", buffering=0) as stream:
        while num_bytes := stream.readinto(buffer):
            yield buffer[:num_bytes]
