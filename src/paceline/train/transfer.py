"""What rank 0 does alone, and what the others then know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.errors import PacelineError
from paceline.world import World

T = TypeVar("T")


def run_on_main(world: World, do: Callable[[], T]) -> T:
    """Runs `do` on rank 0 and gives every rank its result, or raises its `PacelineError` on all.

    Collective. The result is pickled; for tensors of any size use `load_on_main`.
    """
    outcome: Any = None
    if world.is_main:
        try:
            outcome = (True, do())
        except PacelineError as error:
            outcome = (False, error)
    if world.world_size > 1:
        outcome = world.broadcast_object(outcome)
    succeeded, value = outcome
    if not succeeded:
        value.on_every_rank = True
        raise value
    result: T = value
    return result


def load_on_main(world: World, load: Callable[[], Any]) -> Any:
    """Runs `load` on rank 0 and gives every rank the tree of tensors that it returned.

    Collective. Tensors travel one by one as they are on the CPU, so a rank never holds a second copy
    of all of them; only rank 0 needs to see the files.
    """
    tree: Any = None

    def describe() -> Any:
        nonlocal tree
        tree = load()
        return tree_map_only(Tensor, lambda tensor: _Hole(tensor.shape, tensor.dtype), tree)

    skeleton = run_on_main(world, describe)
    if world.world_size == 1:
        return tree
    own = iter([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)])

    def receive(hole: _Hole) -> Tensor:
        tensor = next(own).contiguous() if world.is_main else torch.empty(hole.shape, dtype=hole.dtype)
        if tensor.numel():
            # As bytes: gloo doesn't know every dtype, and bits are what matters here.
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)
        return tensor

    return tree_map_only(_Hole, receive, skeleton)


class _Hole:
    """Where a tensor goes that is sent by itself."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
