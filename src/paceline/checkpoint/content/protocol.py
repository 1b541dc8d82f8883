"""The interface of a content, so that no other code needs to know how tensors are stored.

A content is a way to store the state of a run: a model (tensors by name) and two trees, `optimizer` and
`state`. `folder.py` turns a folder of files into a checkpoint and never reads the files. `Manifest.content`
names the content that wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.checkpoint import tree
from paceline.checkpoint.hashed import FileRecord
from paceline.checkpoint.part import Part
from paceline.checkpoint.tensors import FilePlan, TensorInfo, tensor_bytes, torch_dtype
from paceline.torch_seams.trees import tree_map_only

# The tensors of the model have names only; the other two are trees.
MODEL, TREES = "model", ("optimizer", "state")
RECIPE = "recipe.toml"
# Bytes of a tensor that are in memory at a time while it is hashed or exported.
_BLOCK_BYTES = 4 << 20

Problem = tuple[str, str]


class Prepared(Protocol):
    """The files of a checkpoint that one process writes, checked and ready."""

    @property
    def content(self) -> str:
        """Name of the content."""

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes of the files of all processes."""

    @property
    def late(self) -> frozenset[int]:
        """Ids of the tensors that only an optimizer's step changes; others must be copied immediately."""

    def list_files(self) -> list[FilePlan]:
        """Return the files that this process writes."""


def write_files(plans: Iterable[FilePlan], folder: Path) -> dict[str, FileRecord]:
    """Write files into `folder`, each durable on return; return their records by name."""
    return {plan.name: plan.write(folder) for plan in plans}


class Stored(Protocol):
    """A checkpoint that a content wrote, read tensor by tensor. A group is `MODEL` or one of `TREES`.

    Every method raises `OSError` or `ValueError` for files that do not fit together.

    Attributes:
        folder: of the checkpoint.
        is_shared: whether all ranks wrote it, into a folder that all see, so that each may read by itself.
    """

    folder: Path
    is_shared: bool

    def list_tensors(self, group: str) -> dict[str, TensorInfo]:
        """Return the dtypes and whole shapes of a group's tensors by name, without reading them."""

    def read_structure(self, group: str) -> Any:
        """Return the structure of one of `TREES`, as `tree.encode` made it."""

    def read(self, group: str, name: str, part: Part | None = None) -> torch.Tensor:
        """Read a part of a tensor, or all of it, into CPU memory. An alias has no values of its own."""

    def read_recipe(self) -> str | None:
        """Return the recipe's text, if any."""


class Content(Protocol):
    """A way to store checkpoints."""

    @property
    def name(self) -> str:
        """Its name in a manifest."""

    def open(self, folder: Path) -> Stored:
        """Open a checkpoint of this content. Reads nothing yet."""

    def check(self, folder: Path) -> list[Problem]:
        """Return file names and what is wrong with each, to end a sentence. Reads no tensor."""

    def find_nan(self, file: Path, trained: Collection[str]) -> str:
        """Return the first of the model's trained tensors with a NaN in a file of it, or ""."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint that has not been read.

    Attributes:
        stored: the checkpoint.
        group: of the tensor.
        name: in the group; for an alias, the name that has the values.
        shape: whole.
        dtype: its type.
    """

    stored: Stored
    group: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, part: Part | None = None) -> torch.Tensor:
        """Read a part of it, or all of it, into CPU memory."""
        return self.stored.read(self.group, self.name, part)

    def numpy(self) -> Any:
        """Read it as an array, for arrays in trees."""
        return self.read().numpy()

    def stream(self) -> Iterator[torch.Tensor]:
        """Read it in row-major order, a few megabytes at a time."""
        max_elements = max(1, _BLOCK_BYTES // self.dtype.itemsize)
        for block in Part.all_of(self.shape).blocks(max_elements):
            yield self.read(block)


def list_model(stored: Stored) -> dict[str, StoredTensor]:
    """Return the model's tensors in name order, unread; tied names give equal ones."""
    return _list_group(stored, MODEL)


def open_tree(stored: Stored, group: str) -> Any:
    """Return one of `TREES` with `StoredTensor` in place of tensors. Arrays are read."""
    return tree.decode(stored.read_structure(group), _list_group(stored, group))


def read_all(value: Any) -> Any:
    """Read the unread tensors of a tree; equal ones come back as one tensor."""
    made: dict[tuple[str, str], torch.Tensor] = {}

    def read(tensor: StoredTensor) -> torch.Tensor:
        key = (tensor.group, tensor.name)
        if key not in made:
            made[key] = tensor.read()
        return made[key]

    return tree_map_only(StoredTensor, read, value)


def stream_bytes(
    tensor: StoredTensor, convert: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[memoryview]:
    """Read a tensor's bytes in row-major order, a few megabytes at a time."""
    for block in tensor.stream():
        yield tensor_bytes(block if convert is None else convert(block))


def _list_group(stored: Stored, group: str) -> dict[str, StoredTensor]:
    infos: Mapping[str, TensorInfo] = stored.list_tensors(group)
    return {
        name: StoredTensor(stored, group, info.alias_of or name, info.shape, torch_dtype(info.dtype))
        for name, info in sorted(infos.items())
    }
