"""Computes digests of samples, to compare what ranks read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Samples of a global batch that are compared, spread evenly over it. Hashing takes about 1 ms per MB.
NUM_COMPARED = 16
# A tuple or list with more entries is one field, such as a list of tokens.
_MAX_FIELDS = 16

Digests = Mapping[str, tuple[int, ...]]
"""By field, the digests of some samples of a global batch."""


def digest_fields(samples: Sequence[Any]) -> Digests:
    """Return the digests of `NUM_COMPARED` samples, by field: the keys, places or attributes of a sample."""
    step = -(-len(samples) // NUM_COMPARED)
    found: dict[str, list[int]] = {}
    for sample in samples[::step] if step else ():
        for name, value in list_fields(sample):
            digest = hashlib.blake2b(digest_size=7)
            add_content(digest, value)
            found.setdefault(name, []).append(int.from_bytes(digest.digest(), "little"))
    return {name: tuple(digests) for name, digests in found.items()}


def join_digests(digests: Digests) -> int:
    """Return one 56-bit digest."""
    text = repr(sorted(digests.items())).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def are_alike(digests: Digests) -> bool:
    """Return whether no field differs between samples, so that digests do not show which they are."""
    return all(len(set(each)) <= 1 for each in digests.values())


def list_fields(sample: Any) -> list[tuple[str, Any]]:
    """Return the fields of a sample by name: its keys or places, or all of it."""
    if isinstance(sample, Mapping):
        return [(str(key), value) for key, value in sample.items()]
    if isinstance(sample, (tuple, list)) and len(sample) <= _MAX_FIELDS:
        return [(f"field {place}", value) for place, value in enumerate(sample)]
    return [("the sample", sample)]


def add_content(found: Any, value: Any) -> None:
    """Hash a nest of tensors, arrays and plain values. A value without readable content counts by its
    type."""
    found.update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        found.update(f"{plain.dtype} {list(plain.shape)}".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    elif isinstance(value, np.ndarray | np.generic):
        found.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            found.update(repr(key).encode())
            add_content(found, value[key])
    elif isinstance(value, (list, tuple)):
        found.update(str(len(value)).encode())
        for item in value:
            add_content(found, item)
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        found.update(repr(value).encode())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        add_content(found, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif callable(to_bytes := getattr(value, "tobytes", None)):  # an image of Pillow
        found.update(to_bytes())
