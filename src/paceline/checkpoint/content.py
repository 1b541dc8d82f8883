"""The files of a checkpoint: every writer has one of tensors, and each part of a tensor is written once.

    part-00003.safetensors     what rank 3 wrote: tensors `model/NAME`, `optimizer/NAME`, `state/NAME`
    optimizer.json, state.json structures of the trees (`tree.py`), of rank 0
    recipe.toml                the resolved recipe, of rank 0, where the run has one

Rank 0 may be the only writer, of whole tensors. The files are plain safetensors. If one has only a part of a
tensor, its metadata contain the position of that part in the whole tensor, as runs (start, stop) per
dimension: `{"parts": {"model/NAME": {"whole": [6, 4], "runs": [[[0, 3]], [[0, 4]]]}}}`.
`{"tied": {"model/NAME": "model/OTHER"}}` are names that share their tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import tree
from paceline.checkpoint.hashed import FileRecord
from paceline.checkpoint.manifest import FILE_NAME, BadManifestError, read_manifest
from paceline.checkpoint.part import Part, count_covers
from paceline.checkpoint.tensors import (
    FilePlan,
    OpenFiles,
    TensorInfo,
    UnreadableTensorsError,
    find_aliases,
    find_nan,
    plan_json,
    plan_tensors,
    read_header,
    read_into,
    refuse_unstorable,
    tensor_bytes,
    torch_dtype,
)
from paceline.torch_seams.trees import tree_map_only

# The tensors of the model have names only; the other two are trees.
MODEL, TREES = "model", ("optimizer", "state")
RECIPE = "recipe.toml"
# Bytes of a tensor that are in memory at a time while it is hashed or exported.
_BLOCK_BYTES = 4 << 20
_PREFIX = "part-"

Problem = tuple[str, str]


@dataclass(frozen=True)
class PreparedShare:
    """The files of a checkpoint that one rank writes.

    Attributes:
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


def prepare_whole(
    model: Mapping[str, torch.Tensor], optimizer: Any, state: Any, recipe_toml: str | None
) -> PreparedShare:
    """Check that the whole state can be stored by one writer, before anything is written.

    Args:
        model: whole tensors by name, those of `state_dict()`; not to be changed until they are written.
        optimizer: a tree, usually of the optimizer's state by name.
        state: a tree (`tree.py`) of everything else that the run needs to go on.
        recipe_toml: the resolved recipe, if any.
    """
    for name, tensor in model.items():
        refuse_unstorable(f"{MODEL}.{name}", tensor)
    encoded = {name: tree.encode(held, name) for name, held in zip(TREES, (optimizer, state), strict=True)}
    held = {MODEL: model, **{name: found for name, (_, found) in encoded.items()}}
    tensors = {f"{group}/{name}": each for group, own in held.items() for name, each in own.items()}
    tied = find_tied(tensors)
    tensors = {name: each for name, each in tensors.items() if name not in tied}
    num_bytes = sum(each.numel() * each.element_size() for each in tensors.values())
    structures = {name: structure for name, (structure, _) in encoded.items()}
    return PreparedShare(0, tensors, {}, num_bytes, tied, structures, recipe_toml)


def find_tied(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names that share the memory of another tensor of their group, with its name."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(name.partition("/")[0], {})[name] = tensor
    return {name: kept for held in groups.values() for name, kept in find_aliases(held).items()}


def write_files(plans: Iterable[FilePlan], folder: Path) -> dict[str, FileRecord]:
    """Write files into `folder`, each durable on return; return their records by name."""
    return {plan.name: plan.write(folder) for plan in plans}


def check_files(folder: Path) -> list[Problem]:
    """Check that the parts of every tensor are complete, and that the trees refer to existing tensors."""
    stored = Stored(folder)
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


def find_nan_in(file: Path, trained: Collection[str]) -> str:
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


class Stored:
    """A checkpoint on disk, read tensor by tensor. A group is `MODEL` or one of `TREES`.

    Every method raises `OSError` or `ValueError` for files that do not fit together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = OpenFiles()
        self._read: tuple[dict[str, list[_StoredPart]], dict[str, str]] | None = None

    def list_tensors(self, group: str) -> dict[str, TensorInfo]:
        """Return the dtypes and whole shapes of a group's tensors by name, without reading them."""
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
        """Return the structure of one of `TREES`, as `tree.encode` made it."""
        return json.loads((self.folder / f"{group}.json").read_bytes())

    def read(self, group: str, name: str, part: Part | None = None) -> torch.Tensor:
        """Read a tensor or a part of it into CPU memory, from the files that contain some of it."""
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
            found = _StoredPart(file, name, part, info.dtype)
            sources.setdefault(name, []).append(found)


def _parse_part(entry: Any) -> Part:
    runs = tuple(tuple((int(start), int(stop)) for start, stop in dim) for dim in entry["runs"])
    part = Part(tuple(int(size) for size in entry["whole"]), runs)
    part.check()
    return part


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint that has not been read.

    Attributes:
        name: in the group; for an alias, the name that has the values.
        shape: whole.
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
    infos = stored.list_tensors(group)
    return {
        name: StoredTensor(stored, group, info.alias_of or name, info.shape, torch_dtype(info.dtype))
        for name, info in sorted(infos.items())
    }
