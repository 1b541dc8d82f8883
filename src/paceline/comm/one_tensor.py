"""Names torch's collectives of one tensor as the installed version does; gathers vectors and objects."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# torch 2.13 renamed both and deprecates the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_rows(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the vectors of all ranks of a group, one per row; they have one size and dtype."""
    rows = own.new_empty(group.size(), own.numel())
    all_gather(rows.view(-1), own, group=group)
    return rows


def gather_objects(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks of a group, or of the world; they travel pickled."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found
