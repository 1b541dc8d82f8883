"""Accesses c10d's record of this process's groups, and the store where they met."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.torch_seams.installed import require, set_existing

require("groups")


def forget_group_count() -> None:
    """Make torch name the next group as if it were the first.

    torch names a group by the number of earlier ones, and also counts one that could not be made. This rank
    would then wait for the others under a name that they do not use.
    """
    set_existing(dist.distributed_c10d._world, "group_count", 0)


def find_store() -> Store:
    """Return the store on which the ranks of the default group met."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store
