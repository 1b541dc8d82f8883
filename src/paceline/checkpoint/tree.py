"""Stores state as JSON and tensors, without pickle: reading it back cannot run code.

A *tree* is nested dicts, lists and tuples of `None`, bool, int, float, str, bytes, torch tensors,
numpy arrays and numpy scalars. `encode` splits it into a structure that JSON can hold and a flat
dict of tensors; `decode` puts it together again, with the same types, order and bits.

JSON's own values stand for themselves. Whatever it lacks is an object whose key `"$"` names the kind:
`{"$": "tuple", "items": [...]}`. A dict becomes a JSON object where its keys are strings (and none is
`"$"`), else a list of pairs.

Values that change on the way: an `OrderedDict` and a `torch.Size` come back as dict and tuple, a
`Parameter` as a plain tensor, a tensor of any device on the CPU. Two tensors that were one and the same
come back as one.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.tensors import why_not_storable
from paceline.errors import PacelineError

# Deeper than any real state; also ends the recursion in one that contains itself.
MAX_DEPTH = 100
# Python refuses to print longer ints as decimals (sys.set_int_max_str_digits), so these go as hex.
_MAX_DECIMAL = 1 << 63


class MalformedTreeError(ValueError):
    """The error of a structure that `encode` does not make."""


# From an object that stands for a tensor to that tensor; `None` for any other object.
FindTensor = Callable[[Any], torch.Tensor | None]


def encode(
    tree: Any, root: str, find_tensor: FindTensor | None = None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a tree into a structure for JSON and its tensors by name.

    Args:
        tree: the state; its tensors are referred to, not copied (numpy arrays are copied).
        root: what the tree is called in messages, for example `"state"`.
        find_tensor: for trees in which other objects stand for tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encode(tree, "", 0, _Encoding(root, find_tensor, tensors)), tensors


@dataclass(frozen=True)
class _Encoding:
    """The arguments of a call of `encode`, and the tensors found so far."""

    root: str
    find_tensor: FindTensor | None
    tensors: dict[str, torch.Tensor]


# Training waits while trees are encoded, so these come without a call for each.
_AS_THEY_ARE = frozenset({type(None), bool, str})
_KEY_TYPES = frozenset({str, int, float, bool, bytes, tuple, type(None)})


def _encode(value: Any, path: str, depth: int, to: _Encoding) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is int:
        return value if abs(value) < _MAX_DECIMAL else {"$": "int", "hex": hex(value)}
    if kind is float:
        # repr round-trips finite floats; the others keep their bits, a NaN's payload included.
        return value if math.isfinite(value) else {"$": "float", "hex": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"$": "bytes", "base64": base64.b64encode(value).decode()}
    if kind is dict or kind is OrderedDict:
        return _encode_dict(value, path, depth, to)
    if kind is list:
        return _encode_items(value, path, depth, to)
    if kind is tuple or kind is torch.Size:
        return {"$": "tuple", "items": _encode_items(value, path, depth, to)}
    if isinstance(value, torch.Tensor):
        reason = why_not_storable(value)
        if reason is not None:
            raise _refuse(path, to.root, reason)
        return {"$": "tensor", "name": _add(to.tensors, path, value)}
    if kind is np.ndarray or kind is np.memmap:
        dtype = _dtype_name(value.dtype, path, to.root)
        name = _add(to.tensors, path, _as_tensor(value.tobytes()))
        return {"$": "array", "dtype": dtype, "shape": list(value.shape), "name": name}
    if isinstance(value, np.generic):
        dtype = _dtype_name(value.dtype, path, to.root)
        return {"$": "scalar", "dtype": dtype, "base64": base64.b64encode(value.tobytes()).decode()}
    if to.find_tensor is not None and (found := to.find_tensor(value)) is not None:
        return _encode(found, path, depth, to)
    raise _refuse(path, to.root, f"is a {kind.__module__}.{kind.__qualname__}")


def _encode_items(value: Sequence[Any], path: str, depth: int, to: _Encoding) -> list[Any]:
    if value:
        _check_depth(path, depth, to)
    before = f"{path}." if depth else ""
    return [_encode(item, f"{before}{i}", depth + 1, to) for i, item in enumerate(value)]


def _encode_dict(value: dict[Any, Any], path: str, depth: int, to: _Encoding) -> Any:
    if value:
        _check_depth(path, depth, to)
    before = f"{path}." if depth else ""
    if all(map(_is_plain_key, value)):
        return {
            key: item if type(item) in _AS_THEY_ARE else _encode(item, before + key, depth + 1, to)
            for key, item in value.items()
        }
    encoded = []
    for key, item in value.items():
        inner = before + (key if type(key) is str else repr(key))
        if type(key) not in _KEY_TYPES:
            raise _refuse(inner, to.root, f"has a {type(key).__qualname__} as key")
        # A tuple that is a key holds only hashable things, so no tensors' values hide in it; those
        # compare by identity, which a file cannot keep.
        held: dict[str, torch.Tensor] = {}
        key_code = _encode(key, inner, depth + 1, _Encoding(to.root, None, held))
        if held:
            raise _refuse(inner, to.root, "has a tensor as key")
        encoded.append([key_code, _encode(item, inner, depth + 1, to)])
    return {"$": "dict", "items": encoded}


def _is_plain_key(key: object) -> bool:
    return type(key) is str and key != "$"


def _check_depth(path: str, depth: int, to: _Encoding) -> None:
    if depth >= MAX_DEPTH:
        begin = ".".join(path.split(".")[:8])
        raise _refuse(begin, to.root, f"is nested more than {MAX_DEPTH} deep, or contains itself")


def _add(tensors: dict[str, torch.Tensor], path: str, tensor: torch.Tensor) -> str:
    # Surrogates are legal in Python's strings and in JSON's escapes, but not in a safetensors header.
    wanted = path if path.isascii() else path.encode("utf-8", "backslashreplace").decode()
    wanted = wanted or "value"
    name, count = wanted, 1
    while name in tensors or name == "__metadata__":  # {"a.b": x} and {"a": {"b": y}} have the same path
        count += 1
        name = f"{wanted}~{count}"
    tensors[name] = tensor
    return name


def _as_tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _dtype_name(dtype: np.dtype[Any], path: str, root: str) -> str:
    name = dtype.str
    if dtype.hasobject or dtype.names is not None or np.dtype(name) != dtype:
        raise _refuse(path, root, f"is of numpy's dtype {dtype}")
    return name


def _refuse(path: str, root: str, reason: str) -> PacelineError:
    return PacelineError(
        "PL507",
        saw=f"{root}{path and '.'}{path} {reason}.",
        rule="A checkpoint holds dicts, lists and tuples of None, bool, int, float, str, bytes, tensors and "
        "numpy arrays, so that reading one cannot run code.",
        fix="Convert it in state_dict() and convert it back in load_state_dict(), or leave it out.",
    )


def decode(structure: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the tree that `encode` split; its tensors are those of `tensors`, not copies, read or not.

    Raises:
        MalformedTreeError: for a structure that `encode` does not make, or a tensor that is missing.
    """
    try:
        return _decode(structure, tensors, 0)
    except (KeyError, TypeError, ValueError, AttributeError, struct.error, RecursionError) as error:
        raise MalformedTreeError(f"{type(error).__name__}: {error}") from None


def _decode(structure: Any, tensors: Mapping[str, Any], depth: int) -> Any:
    if depth > MAX_DEPTH + 1:  # else it would load here and not where the stack is deeper
        raise MalformedTreeError(f"nested more than {MAX_DEPTH} deep")
    inner = partial(_decode, tensors=tensors, depth=depth + 1)
    if isinstance(structure, list):
        return list(map(inner, structure))
    if not isinstance(structure, dict):
        return structure
    kind = structure.get("$")
    if kind is None:
        return {key: inner(item) for key, item in structure.items()}
    if kind == "dict":
        return {inner(key): inner(item) for key, item in structure["items"]}
    if kind == "tuple":
        return tuple(map(inner, structure["items"]))
    if kind == "int":
        return int(structure["hex"], 16)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(structure["hex"]))[0]
    if kind == "bytes":
        return base64.b64decode(structure["base64"], validate=True)
    if kind == "tensor":
        return tensors[structure["name"]]
    if kind == "array":
        data = tensors[structure["name"]].numpy().tobytes()
        return _as_array(data, structure["dtype"], tuple(structure["shape"]))
    if kind == "scalar":
        return _as_array(base64.b64decode(structure["base64"], validate=True), structure["dtype"], ())[()]
    raise MalformedTreeError(f"unknown kind {kind!r}")


def _as_array(data: bytes, dtype_name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype_name)
    if dtype.hasobject:
        raise MalformedTreeError(f"dtype {dtype_name!r}")
    if dtype.itemsize * math.prod(shape) != len(data):  # else little data could ask for any amount of memory
        raise MalformedTreeError(f"{len(data)} bytes for {dtype_name!r:.60} of shape {shape!r:.60}")
    if not data:
        return np.zeros(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def list_references(structure: Any) -> Iterator[str]:
    """Yield the names of the tensors that a structure refers to, those of numpy arrays included."""
    if isinstance(structure, list):
        for item in structure:
            yield from list_references(item)
    elif isinstance(structure, dict):
        if structure.get("$") in ("tensor", "array"):
            yield str(structure.get("name"))
        else:
            for item in structure.values():
                yield from list_references(item)
