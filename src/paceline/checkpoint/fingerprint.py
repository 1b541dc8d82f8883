"""Computes one hash over all of a model's weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from paceline.checkpoint.content import StoredTensor, stream_bytes
from paceline.checkpoint.tensors import tensor_bytes


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over full tensors in name order, in hex.

    Each tensor contributes one line of JSON, `["name", "float32", [2, 3]]` and a newline, then the values in
    row-major little-endian order. Tied tensors count under each of their names, so that the hash does not
    depend on whether names share memory; neither does it depend on the device.

    Args:
        tensors: those of `model.state_dict()`, of any device.
    """
    return _hash(tensors, lambda tensor: [tensor_bytes(tensor)])


def hash_stored(tensors: Mapping[str, StoredTensor]) -> str:
    """Return the same hash for tensors that have not been read, a few megabytes at a time."""
    return _hash(tensors, stream_bytes)


def _hash(tensors: Mapping[str, Any], read: Callable[[Any], Iterable[memoryview]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(json.dumps([name, dtype, list(tensor.shape)]).encode() + b"\n")
        for data in read(tensor):
            digest.update(data)
    return digest.hexdigest()
