"""Walks nested lists, tuples and dicts by torch's pytrees, as torch's own modules and hooks do."""

from __future__ import annotations

from paceline.torch_seams.check import checked

with checked("trees"):
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
