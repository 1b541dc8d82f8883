"""The weights of a folder that `save_pretrained` wrote: safetensors, in one file or in indexed shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.tensors import UnreadableTensorsError, read_infos, torch_dtype
from paceline.errors import PacelineError

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Weight:
    """A tensor in a folder that has not been read.

    Attributes:
        read: returns its values, in memory of their own.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """The size of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def check_folder(folder: Path) -> None:
    """Raise PL737 unless there is a folder of this name on this machine."""
    if not folder.is_dir():
        raise _folder_error(
            f"{folder} is no folder on this machine.",
            "Download the model first, for example: hf download NAME --local-dir FOLDER.",
        )


def open_weights(folder: Path) -> dict[str, Weight]:
    """Return the tensors of a folder by name; read the headers of its files only."""
    check_folder(folder)
    files = _list_files(folder)
    found: dict[str, Weight] = {}
    for file, names in files.items():
        path = folder / file
        if not path.is_file():
            raise _folder_error(f"{folder} lacks {file}, which its index names.", "Download it again.")
        try:
            infos = read_infos(path)
            places = _read_places(path)
        except UnreadableTensorsError as error:
            raise _folder_error(f"{path} cannot be read: {error}.", "Download it again.") from None
        lost = sorted((names or set()) - infos.keys())
        if lost:
            raise _folder_error(
                f"{path} has no tensor {lost[0]}, which the index says is there ({len(lost)} such).",
                "Download the folder again, or correct its index.",
            )
        for name, info in infos.items():
            dtype, shape = torch_dtype(info.dtype), info.shape
            found[name] = Weight(shape, dtype, _FileReader(path, places[name], dtype, shape))
    return found


def _list_files(folder: Path) -> dict[str, set[str] | None]:
    """Return the files of weights, and the names that the index says are in each."""
    index = folder / INDEX
    if not index.exists():
        if (folder / ONE).exists():
            return {ONE: None}
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise _folder_error(
                f"{folder} has {pickles[0]}, and no safetensors.",
                "Pickled weights run code when they are loaded. Convert them once: load the model with "
                "transformers where you trust them, and save_pretrained(folder).",
            )
        raise _folder_error(f"{folder} has neither {ONE} nor {INDEX}.", "Name the folder with the weights.")
    try:
        table: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[str, set[str] | None] = {}
        for name, file in table.items():
            if Path(file).name != file:
                raise ValueError(f"{name} is in {file!r}")
            files.setdefault(file, set()).add(name)  # type: ignore[union-attr]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _folder_error(f"{index} is no index of weights ({error}).", "Download it again.") from None
    return files


def _read_places(path: Path) -> dict[str, int]:
    """Return where the values of each tensor begin in a file whose header is valid."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: 8 + length + each["data_offsets"][0] for name, each in header.items() if name != "__metadata__"
    }


@dataclass(frozen=True)
class _FileReader:
    """Reads a tensor of a file, or some of its rows."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __call__(self) -> Tensor:
        return self._read(0, self.shape)

    def rows(self, first: int, last: int) -> Tensor:
        """Return the rows from `first` to before `last`."""
        row_bytes = torch.Size(self.shape[1:]).numel() * self.dtype.itemsize
        return self._read(first * row_bytes, (last - first, *self.shape[1:]))

    def _read(self, begin: int, shape: tuple[int, ...]) -> Tensor:
        # Not by a map of the file, whose pages would count as this process's memory.
        found = torch.empty(shape, dtype=self.dtype)
        if not found.numel():
            return found
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + begin)
            memory: memoryview = found.reshape(-1).view(torch.uint8).numpy().data
            while len(memory):
                count = file.readinto(memory)
                if not count:
                    raise _folder_error(f"{self.path} became shorter while it was read.", "Start again.")
                memory = memory[count:]
        return found


def _folder_error(saw: str, fix: str) -> PacelineError:
    return PacelineError(
        "PL737",
        saw=saw,
        rule="A pretrained model is read from a folder with its weights as safetensors, as its index says.",
        fix=fix,
    )
