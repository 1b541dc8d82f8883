"""Runs functions on rank 0 alone, and sends results and errors between ranks."""

from __future__ import annotations

import hashlib
import socket
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.checkpoint.content import Stored, StoredTensor
from paceline.checkpoint.load import unreadable_error
from paceline.checkpoint.manifest import FILE_NAME
from paceline.checkpoint.part import Part
from paceline.comm.buckets import broadcast_tensors
from paceline.comm.one_tensor import gather_objects
from paceline.errors import PacelineError
from paceline.torch_seams.trees import tree_leaves, tree_map_only, tree_map_with_path
from paceline.train.pieces import OwnPart
from paceline.world import World

T = TypeVar("T")
Cut = Callable[[tuple[Any, ...], Tensor], Tensor]
FindPart = Callable[[tuple[Any, ...], tuple[int, ...]], Part | None]
_TENSORS = (Tensor, StoredTensor)
# Tensors are sent together up to this size: each message costs one or two round trips. It bounds what a rank
# holds beyond its part, and larger tensors take longer than a round trip anyway.
_MESSAGE_BYTES = 256 << 10


def run_on_main(world: World, do: Callable[[], T]) -> T:
    """Run `do` on rank 0 and return its result on every rank, or raise its `PacelineError` on all.

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


def gather(world: World, value: T) -> list[T]:
    """Return every rank's value on every rank, by rank; collective. Values are pickled."""
    return gather_objects(value) if world.world_size > 1 else [value]


def raise_any(errors: Iterable[PacelineError | None]) -> None:
    """Raise the first error that is not `None`; all ranks call it with the same errors."""
    for error in errors:
        if error is not None:
            error.on_every_rank = True
            raise error


def name_rank(world: World, error: PacelineError) -> PacelineError:
    """Return an error whose message also has this rank and its host, for the other ranks."""
    if world.world_size == 1:
        return error
    saw = f"{error.saw} (rank {world.rank} on {socket.gethostname()})"
    return PacelineError(error.code, saw=saw, rule=error.rule, fix=error.fix)


def load_on_main(
    world: World,
    load: Callable[[], Any],
    cut: Cut | None = None,
    find_part: FindPart | None = None,
    folder: Path | None = None,
) -> Any:
    """Run `load` on rank 0 and return its tree of tensors on every rank.

    Collective. Tensors travel as they are on the CPU, small ones together, and a rank keeps what `cut` leaves
    of each, so no rank holds all unread tensors; and only rank 0 needs to see the files. With `find_part`
    every rank reads its parts of the unread tensors of a checkpoint by itself, if all see the files.

    Args:
        load: gives the tree: dicts by name, lists, tensors (read or not) and values that can be pickled.
        cut: from the names that lead to a tensor, and the tensor, to what this rank keeps of it.
        find_part: from the names that lead to a tensor, and its shape, to the part that this rank keeps.
        folder: of the checkpoints, as this rank names it; by default as rank 0 does.
    """
    tree: Any = None

    def describe() -> Any:
        nonlocal tree
        tree = load()
        return tree_map_only(_TENSORS, _SentSeparately.describe, tree), _find_folder(tree)

    skeleton, shared = run_on_main(world, describe)
    stored: Stored | None = None
    if find_part is not None and shared is not None:
        path = shared[0] if folder is None else folder / shared[0].name
        sees = _digest(path) == shared[1]
        stored = Stored(path) if all(gather(world, sees)) else None
    sent = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor if stored else _TENSORS)]
    own = _Source(sent)
    holes = [leaf for leaf in tree_leaves(skeleton) if isinstance(leaf, _SentSeparately)]
    reads_parts = stored is not None and find_part is not None
    mail = _Mail(world, [hole for hole in holes if not (reads_parts and hole.where is not None)], own)

    def receive(path: Any, hole: Any) -> Any:
        if not isinstance(hole, _SentSeparately):
            return hole
        names = tuple(getattr(key, "key", None) for key in path)
        if stored is not None and find_part is not None and hole.where is not None:
            part = find_part(names, tuple(hole.shape))
            read = own.read(StoredTensor(stored, *hole.where, tuple(hole.shape), hole.dtype), part)
            return _mark(names, read) if part is not None else read
        tensor = mail.take()
        kept = tensor if cut is None else cut(names, tensor)
        return kept if kept is tensor else _mark(names, kept)

    found = tree_map_with_path(receive, skeleton)
    raise_any(gather(world, own.error))
    return found


def _mark(names: tuple[Any, ...], part: Tensor) -> Any:
    """Mark a part of an optimizer's state: some state is whole on all ranks, and of the same shape."""
    return OwnPart(names[3], part) if names[0] == "optimizer" else part


def _find_folder(tree: Any) -> tuple[Path, str] | None:
    """Return the folder of a tree's checkpoint and a digest of its manifest, or `None`."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, StoredTensor):
            return leaf.stored.folder, _digest(leaf.stored.folder)
    return None


def _digest(folder: Path) -> str:
    try:
        return hashlib.sha256((folder / FILE_NAME).read_bytes()).hexdigest()
    except OSError:
        return ""


class _Source:
    """The tensors that this rank reads: those that rank 0 sends, in order, or its own parts.

    The other ranks wait for each tensor, so a tensor that cannot be read is reported afterwards.

    Args:
        leaves: tensors to be sent, read or not.

    Attributes:
        error: the first thing that could not be read.
    """

    def __init__(self, leaves: list[Tensor | StoredTensor]) -> None:
        self._leaves = iter(leaves)
        self.error: PacelineError | None = None

    def take(self) -> Tensor:
        """Return the next one to send."""
        leaf = next(self._leaves)
        return leaf.contiguous() if isinstance(leaf, Tensor) else self.read(leaf, None)

    def read(self, tensor: StoredTensor, part: Part | None) -> Tensor:
        """Return a part of a tensor, or all of it."""
        try:
            return tensor.read(part)
        except (OSError, ValueError) as error:
            self.error = self.error or unreadable_error(tensor.stored.folder, error)
            return torch.zeros(tensor.shape if part is None else part.shape, dtype=tensor.dtype)


class _Mail:
    """The tensors that rank 0 sends, on every rank; small ones share a message.

    Args:
        holes: shapes and dtypes of the tensors, in order.
        own: rank 0's tensors, in the same order.
    """

    def __init__(self, world: World, holes: list[_SentSeparately], own: _Source) -> None:
        self._world = world
        self._holes = deque(holes)
        self._own = own
        self._arrived: deque[Tensor] = deque()

    def take(self) -> Tensor:
        """Return the next tensor; collective."""
        if not self._arrived:
            together = [self._holes.popleft()]
            num_bytes = together[0].num_bytes
            while self._holes and num_bytes + self._holes[0].num_bytes <= _MESSAGE_BYTES:
                together.append(self._holes.popleft())
                num_bytes += together[-1].num_bytes
            self._send(together)
        return self._arrived.popleft()

    def _send(self, holes: list[_SentSeparately]) -> None:
        is_main = self._world.is_main
        tensors = [self._own.take() if is_main else torch.empty(h.shape, dtype=h.dtype) for h in holes]
        self._arrived.extend(tensors)
        if self._world.world_size > 1:
            broadcast_tensors(tensors)


class _SentSeparately:
    """A placeholder for a tensor that is sent separately, or read by each rank."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, where: tuple[str, str] | None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.where = where

    @property
    def num_bytes(self) -> int:
        """The size of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    @staticmethod
    def describe(tensor: Tensor | StoredTensor) -> _SentSeparately:
        """Return the placeholder of a tensor, read or not."""
        where = None if isinstance(tensor, Tensor) else (tensor.group, tensor.name)
        return _SentSeparately(torch.Size(tensor.shape), tensor.dtype, where)
