"""The content of whole tensors, which one process writes.

model.safetensors                          the model's tensors by name
optimizer.json, optimizer.safetensors      optimizer state (`tree.py`)
state.json, state.safetensors              everything else of the run (`tree.py`)
recipe.toml                                the resolved recipe, where the run has one
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import tree
from paceline.checkpoint.content.protocol import MODEL, RECIPE, TREES, Problem
from paceline.checkpoint.names import FULL
from paceline.checkpoint.part import Part
from paceline.checkpoint.tensors import (
    FilePlan,
    OpenFiles,
    TensorInfo,
    UnreadableTensorsError,
    find_aliases,
    find_nan,
    plan_json,
    plan_tensors,
    read_infos,
    read_tensor,
    refuse_unstorable,
)

NAME = FULL


@dataclass(frozen=True)
class PreparedFull:
    """The files of one checkpoint, ready to be written.

    Attributes:
        model: tensors by full name, tied ones under every name.
        trees: `"optimizer"` and `"state"`, as `tree.encode` returns them.
        recipe_toml: the resolved recipe.
        late: ids of the tensors that only an optimizer's step changes.
    """

    model: Mapping[str, torch.Tensor]
    trees: Mapping[str, tuple[Any, Mapping[str, torch.Tensor]]]
    recipe_toml: str | None
    late: frozenset[int] = frozenset()
    content: str = NAME

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes of the files: those of the tensors, tied ones counted once."""
        held = [self.model, *(tensors for _, tensors in self.trees.values())]
        return sum(
            tensor.numel() * tensor.element_size()
            for tensors, aliases in ((tensors, find_aliases(tensors)) for tensors in held)
            for name, tensor in tensors.items()
            if name not in aliases
        )

    def list_files(self) -> list[FilePlan]:
        """Return all files of the content."""
        plans = [plan_tensors(_tensors(MODEL), self.model)]
        for name, (structure, tensors) in self.trees.items():
            plans += [plan_tensors(_tensors(name), tensors), plan_json(_structure(name), structure)]
        if self.recipe_toml is not None:
            plans.append(FilePlan(RECIPE, (self.recipe_toml.encode(),)))
        return plans


def prepare(
    model: Mapping[str, torch.Tensor], optimizer: Any, state: Any, recipe_toml: str | None
) -> PreparedFull:
    """Check that the whole state can be stored, before anything is written.

    Args:
        model: whole tensors by name, those of `state_dict()`; not to be changed until they are written.
        optimizer: a tree, usually of the optimizer's state by name.
        state: a tree (`tree.py`) of everything else that the run needs to go on.
        recipe_toml: the resolved recipe, if any.

    Raises:
        PacelineError: PL507, with the path to what cannot be stored.
    """
    for name, tensor in model.items():
        refuse_unstorable(f"model.{name}", tensor)
    trees = {name: tree.encode(held, name) for name, held in zip(TREES, (optimizer, state), strict=True)}
    return PreparedFull(dict(model), trees, recipe_toml)


class Full:
    """The content of whole tensors."""

    name = NAME

    def open(self, folder: Path) -> FullStored:
        """Open a checkpoint of this content."""
        return FullStored(folder)

    def check(self, folder: Path) -> list[Problem]:
        """Compare structures with headers, without reading tensors."""
        stored = FullStored(folder)
        problems: list[Problem] = []
        try:
            stored.list_tensors(MODEL)
        except UnreadableTensorsError as error:
            problems.append((_tensors(MODEL), f"cannot be read ({error})"))
        for name in TREES:
            try:
                wanted = set(tree.list_references(stored.read_structure(name)))
                there = set(stored.list_tensors(name))
            except (OSError, ValueError, RecursionError) as error:
                problems.append((_structure(name), f"cannot be read ({error})"))
                continue
            problems += [
                (_structure(name), f"refers to tensor {tensor!r}, which {_tensors(name)} lacks")
                for tensor in sorted(wanted - there)
            ]
            problems += [
                (_tensors(name), f"has tensor {tensor!r}, which {_structure(name)} never names")
                for tensor in sorted(there - wanted)
            ]
        return problems

    def find_nan(self, file: Path, trained: Collection[str]) -> str:
        """Return the first trained tensor with a NaN in a file, or ""."""
        return find_nan(file, trained) if file.name == _tensors(MODEL) else ""


class FullStored:
    """A checkpoint of whole tensors on disk.

    Args:
        folder: of the checkpoint.
    """

    is_shared = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = OpenFiles()

    def list_tensors(self, group: str) -> dict[str, TensorInfo]:
        """Return the tensors in the header of a group's file."""
        return read_infos(self.folder / _tensors(group))

    def read_structure(self, group: str) -> Any:
        """Return the structure of a tree."""
        return json.loads((self.folder / _structure(group)).read_bytes())

    def read(self, group: str, name: str, part: Part | None = None) -> torch.Tensor:
        """Read a tensor or a part of it."""
        return read_tensor(self.folder / _tensors(group), name, part, self._files)

    def read_recipe(self) -> str | None:
        """Return the recipe's text, if any."""
        path = self.folder / RECIPE
        return path.read_bytes().decode() if path.exists() else None


def _tensors(group: str) -> str:
    return f"{group}.safetensors"


def _structure(group: str) -> str:
    return f"{group}.json"
