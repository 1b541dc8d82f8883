"""State on disk: committed by one rename, verified by hashes, read back without running code.

No function here calls a collective: `train/state/` coordinates which rank writes and reads what.
"""

from paceline.checkpoint.export import export_model
from paceline.checkpoint.fingerprint import hash_stored, hash_tensors
from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.identity import check_identity, describe_identity
from paceline.checkpoint.load import Loaded, find_checkpoint, list_at, load_checkpoint, open_usable
from paceline.checkpoint.verify import is_usable, verify

__all__ = [
    "CheckpointFolder",
    "Loaded",
    "check_identity",
    "describe_identity",
    "export_model",
    "find_checkpoint",
    "hash_stored",
    "hash_tensors",
    "is_usable",
    "list_at",
    "load_checkpoint",
    "open_usable",
    "verify",
]
