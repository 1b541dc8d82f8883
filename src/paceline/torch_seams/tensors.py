"""Accesses private parts of torch's tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.torch_seams.installed import require

require("tensors")


def read_version(tensor: Tensor) -> int:
    """Return the number of in-place writes to a tensor."""
    return tensor._version


def find_base(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of, or None."""
    return tensor._base


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no numbers, because an operation runs for the shape of its result alone.

    Its class is not imported for that, which would be slow.
    """
    return type(tensor).__name__ == "FakeTensor"


def identify(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's own record, the same for all of its Python objects."""
    return int(storage._cdata)


def read_hooks(tensor: Tensor) -> Any:
    """Return the dict of the hooks of `register_hook`, or None."""
    return tensor._backward_hooks


def set_hooks(tensor: Tensor, hooks: Any) -> None:
    """Replace a tensor's dict of hooks, so that the handles of the dict's hooks still remove them."""
    tensor._backward_hooks = hooks


def read_accumulate_hooks(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks of `register_post_accumulate_grad_hook`."""
    return getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
