"""The content of a checkpoint that one process writes: whole tensors.

This file knows which files there are and what is in them; `folder.py` knows how a folder of files
becomes a checkpoint. A sharded checkpoint replaces this file and not that one: it writes other files
into the same temporary folder and names itself in `Manifest.content`.

    model.safetensors                          the model's tensors by name
    optimizer.json, optimizer.safetensors      optimizer state (`tree.py`)
    state.json, state.safetensors              everything else of the run (`tree.py`)
    recipe.toml                                the resolved recipe, where the run has one
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import tree
from paceline.checkpoint.tensors import (
    FileRecord,
    HashedFile,
    UnreadableTensorsError,
    find_aliases,
    read_infos,
    read_tensors,
    why_not_storable,
    write_tensors,
)
from paceline.errors import PacelineError

CONTENT = "full"
MODEL, RECIPE = "model.safetensors", "recipe.toml"
TREES = ("optimizer", "state")


@dataclass(frozen=True)
class FullContent:
    """What one checkpoint holds, ready to be written.

    Attributes:
        model: tensors by full name, tied ones under every name.
        trees: `"optimizer"` and `"state"`, as `tree.encode` gives them.
        recipe_toml: the resolved recipe.
    """

    model: Mapping[str, torch.Tensor]
    trees: Mapping[str, tuple[Any, Mapping[str, torch.Tensor]]]
    recipe_toml: str | None

    @property
    def num_bytes(self) -> int:
        """About how many bytes the files will take: those of the tensors, tied ones counted once."""
        held = [self.model, *(tensors for _, tensors in self.trees.values())]
        return sum(
            tensor.numel() * tensor.element_size()
            for tensors, aliases in ((tensors, find_aliases(tensors)) for tensors in held)
            for name, tensor in tensors.items()
            if name not in aliases
        )


def prepare(
    model: Mapping[str, torch.Tensor], optimizer: Any, state: Any, recipe_toml: str | None
) -> FullContent:
    """Checks that all of it can be stored, before anything is written.

    Raises:
        PacelineError: PL507, with the path to what can't.
    """
    for name, tensor in model.items():
        reason = why_not_storable(tensor)
        if reason is not None:
            raise PacelineError(
                "PL507",
                saw=f"model.{name} {reason}.",
                rule="A checkpoint holds dense, plain tensors with values.",
                fix="Convert it, or register it as non-persistent so that state_dict() leaves it out.",
            )
    trees = {name: tree.encode(held, name) for name, held in zip(TREES, (optimizer, state), strict=True)}
    return FullContent(dict(model), trees, recipe_toml)


def write_content(folder: Path, content: FullContent) -> dict[str, FileRecord]:
    """Writes all files of the content into `folder`, each durable on return.

    Returns:
        Size and hash of every file by name.
    """
    records = {MODEL: write_tensors(folder / MODEL, content.model)}
    for name, (structure, tensors) in content.trees.items():
        records[f"{name}.safetensors"] = write_tensors(folder / f"{name}.safetensors", tensors)
        text = json.dumps(structure, indent=1, allow_nan=False)
        records[f"{name}.json"] = _write_text(folder / f"{name}.json", text + "\n")
    if content.recipe_toml is not None:
        records[RECIPE] = _write_text(folder / RECIPE, content.recipe_toml)
    return records


def _write_text(path: Path, text: str) -> FileRecord:
    with HashedFile(path) as file:
        file.write(text.encode())
    return file.record


def check_content(folder: Path) -> list[tuple[str, str]]:
    """Looks whether the files fit together, from structures and headers, without reading tensors.

    Returns:
        File name and what is wrong with it, as the end of a sentence.
    """
    problems: list[tuple[str, str]] = []
    try:
        read_infos(folder / MODEL)
    except UnreadableTensorsError as error:
        problems.append((MODEL, f"can't be read ({error})"))
    for name in TREES:
        try:
            structure = json.loads((folder / f"{name}.json").read_bytes())
            wanted = set(tree.list_references(structure))
            there = set(read_infos(folder / f"{name}.safetensors"))
        except (OSError, ValueError) as error:
            problems.append((f"{name}.json", f"can't be read ({error})"))
            continue
        for tensor in sorted(wanted - there):
            problems.append((f"{name}.json", f"refers to tensor {tensor!r}, which {name}.safetensors lacks"))
        for tensor in sorted(there - wanted):
            problems.append((f"{name}.safetensors", f"has tensor {tensor!r}, which {name}.json never names"))
    return problems


def read_model(folder: Path) -> dict[str, torch.Tensor]:
    """The model's tensors, on the CPU, in name order; tied names give one tensor."""
    return dict(sorted(read_tensors(folder / MODEL).items()))


def read_tree(folder: Path, name: str) -> Any:
    """The tree `name` ("optimizer" or "state"), its tensors on the CPU."""
    structure = json.loads((folder / f"{name}.json").read_bytes())
    return tree.decode(structure, read_tensors(folder / f"{name}.safetensors"))


def read_recipe(folder: Path) -> str | None:
    """The recipe's text, where there is one."""
    path = folder / RECIPE
    return path.read_bytes().decode() if path.exists() else None
