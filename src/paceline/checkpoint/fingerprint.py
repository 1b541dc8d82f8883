"""One number for all of a model's weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from paceline.checkpoint.tensors import tensor_bytes


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over full tensors in name order, in hex.

    Per tensor it takes in one line of JSON, `["name", "float32", [2, 3]]` and a newline, then the
    values in row-major little-endian order. Tied tensors count under each of their names, so that the
    hash doesn't depend on whether names share memory; neither does it depend on the device.

    Args:
        tensors: what `model.state_dict()` gives, of any device.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(json.dumps([name, dtype, list(tensor.shape)]).encode() + b"\n")
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
