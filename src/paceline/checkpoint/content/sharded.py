"""The content of shares: every rank writes one file of tensors, and each part is written once.

    part-00003.safetensors     what rank 3 wrote: tensors `model/NAME`, `optimizer/NAME`, `state/NAME`
    optimizer.json, state.json structures of the trees (`tree.py`), of rank 0
    recipe.toml                the resolved recipe, of rank 0, where the run has one

The files are plain safetensors. If one has only a part of a tensor, its metadata contain the position of that
part in the whole tensor, as runs (start, stop) per dimension:
`{"parts": {"model/NAME": {"whole": [6, 4], "runs": [[[0, 3]], [[0, 4]]]}}}`.
`{"tied": {"model/NAME": "model/OTHER"}}` are names that share their tensor.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import tree
from paceline.checkpoint.content.protocol import MODEL, RECIPE, TREES, Problem
from paceline.checkpoint.manifest import FILE_NAME, BadManifestError, read_manifest
from paceline.checkpoint.names import SHARDED
from paceline.checkpoint.part import Part, count_covers
from paceline.checkpoint.tensors import (
    FilePlan,
    OpenFiles,
    TensorInfo,
    UnreadableTensorsError,
    find_nan,
    plan_json,
    plan_tensors,
    read_header,
    read_into,
    torch_dtype,
)

NAME = SHARDED
_PREFIX = "part-"


@dataclass(frozen=True)
class PreparedShare:
    """The files of a checkpoint that one rank writes.

    Attributes:
        rank: of the writer.
        tensors: by name with the group before it, `model/NAME`; each the values of a part.
        parts: the parts, for tensors that are not whole.
        num_bytes: of all ranks' shares together.
        tied: names to the name that has their tensor; rank 0's.
        structures: of the trees; rank 0's.
        recipe_toml: the resolved recipe; rank 0's.
        late: ids of the tensors that only an optimizer's step changes.
    """

    rank: int
    tensors: Mapping[str, torch.Tensor]
    parts: Mapping[str, Part]
    num_bytes: int
    tied: Mapping[str, str] = field(default_factory=dict)
    structures: Mapping[str, Any] = field(default_factory=dict)
    recipe_toml: str | None = None
    late: frozenset[int] = frozenset()
    content: str = NAME

    def list_files(self) -> list[FilePlan]:
        """Return this rank's files."""
        metadata = {}
        if self.parts:
            described = {
                name: {"whole": part.whole, "runs": part.runs} for name, part in sorted(self.parts.items())
            }
            metadata["parts"] = json.dumps(described)
        if self.tied:
            metadata["tied"] = json.dumps(self.tied, sort_keys=True)
        plans = [plan_tensors(f"{_PREFIX}{self.rank:05d}.safetensors", self.tensors, metadata=metadata)]
        plans += [plan_json(f"{group}.json", structure) for group, structure in self.structures.items()]
        if self.recipe_toml is not None:
            plans.append(FilePlan(RECIPE, (self.recipe_toml.encode(),)))
        return plans


class Sharded:
    """The content of shares."""

    name = NAME

    def open(self, folder: Path) -> ShardedStored:
        """Open a checkpoint of this content."""
        return ShardedStored(folder)

    def check(self, folder: Path) -> list[Problem]:
        """Check that the parts of every tensor are complete, and that the trees refer to existing tensors."""
        stored = ShardedStored(folder)
        try:
            problems = stored.check_parts()
            for group in (MODEL, *TREES):
                stored.list_tensors(group)
        except UnreadableTensorsError as error:
            return [(error.file or FILE_NAME, f"cannot be read ({error})")]
        for group in TREES:
            file = f"{group}.json"
            try:
                wanted = set(tree.list_references(stored.read_structure(group)))
            except (OSError, ValueError, RecursionError) as error:
                problems.append((file, f"cannot be read ({error})"))
                continue
            there = set(stored.list_tensors(group))
            problems += [
                (file, f"refers to tensor {name!r}, which no file has") for name in sorted(wanted - there)
            ]
            problems += [
                (stored.find_file(group, name), f"has tensor {name!r}, which {file} never names")
                for name in sorted(there - wanted)
            ]
        return problems

    def find_nan(self, file: Path, trained: Collection[str]) -> str:
        """Return the first trained tensor with a NaN in a file, or ""."""
        names = {f"{MODEL}/{name}" for name in trained}
        return find_nan(file, names).removeprefix(f"{MODEL}/") if file.name.startswith(_PREFIX) else ""


@dataclass(frozen=True)
class _StoredPart:
    """The location of a part of a tensor: a file, the tensor in it, and which part of the whole that is."""

    file: str
    name: str
    part: Part
    dtype: str


class ShardedStored:
    """A checkpoint of shares on disk.

    Args:
        folder: of the checkpoint.
    """

    is_shared = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = OpenFiles()
        self._read: tuple[dict[str, list[_StoredPart]], dict[str, str]] | None = None

    def list_tensors(self, group: str) -> dict[str, TensorInfo]:
        """Return the tensors of a group in the headers of all files."""
        sources, tied = self._sources()
        begin = f"{group}/"
        infos = {
            name.removeprefix(begin): TensorInfo(found[0].dtype, found[0].part.whole)
            for name, found in sources.items()
            if name.startswith(begin)
        }
        for name, kept in tied.items():
            if name.startswith(begin):
                if kept not in sources or name in sources or not kept.startswith(begin):
                    raise UnreadableTensorsError(f"{name} cannot share the tensor of {kept}")
                own, other = name.removeprefix(begin), kept.removeprefix(begin)
                infos[own] = TensorInfo(infos[other].dtype, infos[other].shape, other)
        return dict(sorted(infos.items()))

    def read_structure(self, group: str) -> Any:
        """Return the structure of a tree."""
        return json.loads((self.folder / f"{group}.json").read_bytes())

    def read(self, group: str, name: str, part: Part | None = None) -> torch.Tensor:
        """Read a tensor or a part of it, from the files that contain some of it."""
        sources = self._sources()[0].get(f"{group}/{name}")
        if sources is None:
            raise UnreadableTensorsError(f"no file has {group}/{name}")
        wanted = part or Part.all_of(sources[0].part.whole)
        needed = [source for source in sources if any(True for _ in wanted.overlap(source.part))]
        found = torch.empty(wanted.shape, dtype=torch_dtype(sources[0].dtype))
        for source in needed:
            read_into(self.folder / source.file, source.name, source.part, wanted, found, self._files)
        return found

    def read_recipe(self) -> str | None:
        """Return the recipe's text, if any."""
        path = self.folder / RECIPE
        return path.read_bytes().decode() if path.exists() else None

    def find_file(self, group: str, name: str) -> str:
        """Return the first file that contains some of a tensor."""
        sources, tied = self._sources()
        full = f"{group}/{name}"
        return sources[tied.get(full, full)][0].file

    def check_parts(self) -> list[Problem]:
        """Return the problems of the parts: outside of the whole, overlapping, or incomplete."""
        problems: list[Problem] = []
        for name, sources in self._sources()[0].items():
            first = sources[0]
            if any((s.part.whole, s.dtype) != (first.part.whole, first.dtype) for s in sources):
                problems.append((first.file, f"has another shape or type of {name} than {sources[-1].file}"))
                continue
            try:
                least, most = count_covers([source.part for source in sources])
            except ValueError as error:
                problems.append((first.file, f"has parts of {name} that no layout makes ({error})"))
                continue
            if most > 1:
                problems.append((first.file, f"and other files have the same elements of {name}"))
            if least < 1:
                problems.append((first.file, f"and the other files lack numbers of {name}"))
        return problems

    def _sources(self) -> tuple[dict[str, list[_StoredPart]], dict[str, str]]:
        """Return the parts of every tensor, by name with the group, and the names that share a tensor."""
        if self._read is None:
            try:
                files = [name for name in read_manifest(self.folder).files if name.startswith(_PREFIX)]
            except BadManifestError as error:
                raise UnreadableTensorsError(f"the manifest {error}") from None
            sources: dict[str, list[_StoredPart]] = {}
            tied: dict[str, str] = {}
            for file in sorted(files):
                self._add_file(file, sources, tied)
            self._read = sources, tied
        return self._read

    def _add_file(self, file: str, sources: dict[str, list[_StoredPart]], tied: dict[str, str]) -> None:
        infos, metadata = read_header(self.folder / file)
        try:
            described = json.loads(metadata.get("parts", "{}"))
            parts = {name: _parse_part(entry) for name, entry in described.items()}
            tied |= {str(name): str(kept) for name, kept in json.loads(metadata.get("tied", "{}")).items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UnreadableTensorsError(f"its parts are not parts: {error}", file=file) from None
        for name, info in infos.items():
            part = parts.get(name) or Part.all_of(info.shape)
            if part.shape != info.shape:
                raise UnreadableTensorsError(
                    f"{name} has shape {list(info.shape)}, and its part {list(part.shape)}",
                    file=file,
                )
            found = _StoredPart(file, info.alias_of or name, part, info.dtype)
            sources.setdefault(name, []).append(found)


def _parse_part(entry: Any) -> Part:
    runs = tuple(tuple((int(start), int(stop)) for start, stop in dim) for dim in entry["runs"])
    part = Part(tuple(int(size) for size in entry["whole"]), runs)
    part.check()
    return part
