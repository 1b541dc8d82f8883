"""State on disk: committed by one rename, verified by hashes, read back without running code.

No function here calls a collective: `train/state/` coordinates which rank writes and reads what.
Names load on first use: commands that only list checkpoints do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.checkpoint.commit import CheckpointFolder
    from paceline.checkpoint.export import export_model
    from paceline.checkpoint.fingerprint import hash_stored, hash_tensors
    from paceline.checkpoint.identity import check_identity, describe_identity
    from paceline.checkpoint.load import (
        Loaded,
        find_best,
        find_checkpoint,
        list_at,
        open_usable,
    )
    from paceline.checkpoint.validity import is_usable, verify

__all__ = [
    "CheckpointFolder",
    "Loaded",
    "check_identity",
    "describe_identity",
    "export_model",
    "find_best",
    "find_checkpoint",
    "hash_stored",
    "hash_tensors",
    "is_usable",
    "list_at",
    "open_usable",
    "verify",
]

_HOMES = {
    "CheckpointFolder": "commit",
    "Loaded": "load",
    "check_identity": "identity",
    "describe_identity": "identity",
    "export_model": "export",
    "find_best": "load",
    "find_checkpoint": "load",
    "hash_stored": "fingerprint",
    "hash_tensors": "fingerprint",
    "is_usable": "validity",
    "list_at": "load",
    "open_usable": "load",
    "verify": "validity",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
