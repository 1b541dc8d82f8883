"""What rank 0 does alone, and what the others then know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only, tree_map_with_path

from paceline.checkpoint.content.protocol import StoredTensor, read_all
from paceline.checkpoint.load import unreadable_error
from paceline.errors import PacelineError
from paceline.world import World

T = TypeVar("T")
Cut = Callable[[tuple[Any, ...], Tensor], Tensor]
_TENSORS = (Tensor, StoredTensor)


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


def load_on_main(world: World, load: Callable[[], Any], cut: Cut | None = None) -> Any:
    """Runs `load` on rank 0 and gives every rank the tree of tensors that it returned.

    Collective. Tensors travel one by one as they are on the CPU, and a rank keeps what `cut` leaves of each,
    so no rank holds all of those that are unread; and only rank 0 needs to see the files.

    Args:
        world: the ranks.
        load: gives the tree: dicts by name, lists, tensors (read or not) and values that can be pickled.
        cut: from the names that lead to a tensor, and the tensor, to what this rank keeps of it.
    """
    tree: Any = None

    def describe() -> Any:
        nonlocal tree
        tree = load()
        return tree_map_only(
            _TENSORS, lambda tensor: _SentSeparately(torch.Size(tensor.shape), tensor.dtype), tree
        )

    skeleton = run_on_main(world, describe)
    if world.world_size == 1:
        return read_all(tree)
    own = _Source([leaf for leaf in tree_leaves(tree) if isinstance(leaf, _TENSORS)])

    def receive(path: Any, hole: Any) -> Any:
        if not isinstance(hole, _SentSeparately):
            return hole
        tensor = own.take(hole) if world.is_main else torch.empty(hole.shape, dtype=hole.dtype)
        if tensor.numel():
            # As bytes: gloo doesn't know every dtype, and bits are what matters here.
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)
        names = tuple(getattr(key, "key", None) for key in path)
        return tensor if cut is None else cut(names, tensor)

    found = tree_map_with_path(receive, skeleton)
    run_on_main(world, own.check)
    return found


class _Source:
    """The tensors of rank 0 in order, read one at a time where they are in a checkpoint.

    Args:
        leaves: tensors, read or not.
    """

    def __init__(self, leaves: list[Tensor | StoredTensor]) -> None:
        self._leaves = iter(leaves)
        self._error: PacelineError | None = None

    def take(self, hole: _SentSeparately) -> Tensor:
        """Return the next one. The other ranks wait for it, so what can't be read is told afterwards."""
        leaf = next(self._leaves)
        if isinstance(leaf, Tensor):
            return leaf.contiguous()
        try:
            return leaf.read()
        except (OSError, ValueError) as error:
            self._error = unreadable_error(leaf.name, error)
            return torch.zeros(hole.shape, dtype=hole.dtype)

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error


class _SentSeparately:
    """Where a tensor goes that is sent by itself."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
