"""Describes the machine of a measurement."""

from __future__ import annotations

import platform

import torch

from paceline.checkpoint.identity import describe_identity
from paceline.place import usable_cores


def describe_machine() -> str:
    """Return the processor, the cores that this process may use, the system, Python and torch."""
    return (
        f"{describe_identity('cpu')['processor']}, {usable_cores()} cores, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
