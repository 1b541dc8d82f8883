"""Data sets that models train on: deterministic samples from files.

Names load on first use: `prepare_data` must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.data.prepare import prepare_data
    from paceline.data.task import TaskData, build_data

__all__ = ["TaskData", "build_data", "prepare_data"]

_HOMES = {
    "TaskData": "task",
    "build_data": "task",
    "prepare_data": "prepare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
