"""Walks nested lists, tuples and dicts by torch's pytrees, as torch's own modules and hooks do."""

from __future__ import annotations

from paceline.torch_seams.check import checked

with checked("trees"):
    from torch.utils._pytree import (
        TreeSpec,
        keystr,
        tree_flatten,
        tree_flatten_with_path,
        tree_iter,
        tree_leaves,
        tree_map,
        tree_map_only,
        tree_map_with_path,
        tree_unflatten,
    )

__all__ = [
    "TreeSpec",
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_map_with_path",
    "tree_unflatten",
]
