"""State on disk: committed by one rename, checked by hashes, read back without running code.

Rank 0 writes and reads whole checkpoints. Only `optimizer.py` calls collectives, to gather tensors.
"""

from paceline.checkpoint.export import export_model
from paceline.checkpoint.fingerprint import hash_tensors
from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.identity import check_identity, describe_identity
from paceline.checkpoint.load import Loaded, find_checkpoint, list_at, load_checkpoint
from paceline.checkpoint.optimizer import load_optimizer_state_by_name, optimizer_state_by_name
from paceline.checkpoint.verify import is_usable, verify

__all__ = [
    "CheckpointFolder",
    "Loaded",
    "check_identity",
    "describe_identity",
    "export_model",
    "find_checkpoint",
    "hash_tensors",
    "is_usable",
    "list_at",
    "load_checkpoint",
    "load_optimizer_state_by_name",
    "optimizer_state_by_name",
    "verify",
]
