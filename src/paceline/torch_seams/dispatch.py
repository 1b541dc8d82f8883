"""Observes every operation of torch, and calls operations hidden from modes."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.torch_seams.installed import checked

with checked("dispatch"):
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_modes

without_functions = torch._C.DisableTorchFunction

__all__ = [
    "TorchDispatchMode",
    "has_modes",
    "is_innermost",
    "read_schema",
    "without_functions",
    "without_modes",
]


def has_modes() -> bool:
    """Return whether a dispatch mode is active."""
    return bool(torch._C._len_torch_dispatch_stack())


def is_innermost(mode: TorchFunctionMode) -> bool:
    """Return whether a function mode is the one that was entered last."""
    return torch.overrides._get_current_function_mode() is mode  # type: ignore[no-untyped-call]


def read_schema(operator: Any) -> Any:
    """Return an operator's schema: its name, its overload, its arguments, and which of them it writes."""
    return operator._schema
