"""Walks nested lists, tuples and dicts by torch's pytrees, as torch's own modules and hooks do."""

from __future__ import annotations

from collections import UserDict
from typing import Any

from paceline.torch_seams.installed import checked

with checked("trees"):
    from torch.utils._pytree import SUPPORTED_NODES, MappingKey, register_pytree_node
    from torch.utils._pytree import (
        TreeSpec as TreeSpec,
    )
    from torch.utils._pytree import (
        keystr as keystr,
    )
    from torch.utils._pytree import (
        tree_flatten as tree_flatten,
    )
    from torch.utils._pytree import (
        tree_flatten_with_path as tree_flatten_with_path,
    )
    from torch.utils._pytree import (
        tree_iter as tree_iter,
    )
    from torch.utils._pytree import (
        tree_leaves as tree_leaves,
    )
    from torch.utils._pytree import (
        tree_map as tree_map,
    )
    from torch.utils._pytree import (
        tree_map_only as tree_map_only,
    )
    from torch.utils._pytree import (
        tree_map_with_path as tree_map_with_path,
    )
    from torch.utils._pytree import (
        tree_unflatten as tree_unflatten,
    )


def learn_mapping(batch: Any) -> None:
    """Let trees walk into a batch that is a `UserDict` and no dict, as transformers' tokenizers return."""
    kind = type(batch)
    if not isinstance(batch, UserDict) or kind in SUPPORTED_NODES:
        return

    def flatten(mapping: Any) -> tuple[list[Any], list[Any]]:
        return list(mapping.values()), list(mapping)

    def flatten_with_keys(mapping: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
        return [(MappingKey(key), value) for key, value in mapping.items()], list(mapping)

    register_pytree_node(
        kind,
        flatten,
        lambda values, keys: kind(dict(zip(keys, values, strict=True))),
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
