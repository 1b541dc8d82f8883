"""Recognises autograd's nodes."""

from __future__ import annotations

from typing import Any

from paceline.torch_seams.installed import require
from paceline.torch_seams.table import VIEW_NODES

require("autograd")


def is_view(node: Any) -> bool:
    """Return whether a node of autograd only views, copies or cuts its input: no value changes."""
    return type(node).__name__ in VIEW_NODES
