"""The states that the tests save, and their comparison bit for bit."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checkpoint import CheckpointFolder, Loaded, load
from paceline.checkpoint.content import PreparedShare, prepare_whole, read_all, write_files
from paceline.checkpoint.folder_names import CHECKPOINTS, LOCK
from paceline.checkpoint.hashed import FileRecord
from paceline.checkpoint.load import check_usable, find_newest, open_usable
from paceline.checkpoint.part import Part
from paceline.checkpoint.tensors import OpenFiles, plan_tensors, read_infos, read_into, torch_dtype

RECIPE = "[train]\nsteps = 100  # schön\n"
IDENTITY = {"torch": "2.13.0", "threads_per_rank": 1}
FILES = (
    "manifest.json",
    "optimizer.json",
    "part-00000.safetensors",
    "recipe.toml",
    "state.json",
)


def make_model(step: int, size: int = 64) -> dict[str, torch.Tensor]:
    """Tensors whose values tell the step; two of them are tied."""
    weight = torch.arange(size * 4, dtype=torch.float32).reshape(size, 4) + step
    return {"head.weight": weight, "embed.weight": weight, "norm.bias": torch.full((3,), step * 1.0)}


def make_optimizer(step: int) -> dict[str, Any]:
    """Return a tree like an optimizer's."""
    moment = torch.full((64, 4), step / 3)
    return {
        "kind": "Adam",
        "parameters": {"embed.weight": {"state": {"step": torch.tensor(step * 1.0), "exp_avg": moment}}},
    }


def make_state(step: int) -> dict[str, Any]:
    """Return a tree with one of everything."""
    return {
        "loss": step / 7,
        "data": {"epoch": 1, "position": (step, None)},
        "rng": {0: torch.arange(16, dtype=torch.uint8), "numpy": np.arange(step, step + 5)},
        "raw": bytes([step % 256, 0, 255]),
    }


def read(path: Path) -> Loaded:
    """Return a checkpoint that has been found usable, all of it in memory."""
    found = open_usable(path)
    model, optimizer, state = map(read_all, (found.model, found.optimizer, found.state))
    return replace(found, model=model, optimizer=optimizer, state=state)


def load_checkpoint(path: str | Path) -> Loaded:
    """Check every hash of a checkpoint and read it."""
    check_usable(Path(path))
    return read(Path(path))


def load_newest(folder: CheckpointFolder, on_skip: Any = load.warn_of_skip) -> Loaded | None:
    """Return the newest valid checkpoint, all of it in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "warn_of_skip", on_skip)
        return read(find_newest(folder.path)) if folder.steps() else None


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """Return a tensor of a safetensors file."""
    info = read_infos(path)[name]
    whole, found = Part.all_of(info.shape), torch.empty(info.shape, dtype=torch_dtype(info.dtype))
    read_into(path, name, whole, whole, found, OpenFiles())
    return found


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a safetensors file."""
    return {name: read_tensor(path, name) for name in read_infos(path)}


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a safetensors file as a save does."""
    return plan_tensors(path.name, tensors, metadata=metadata).write(path.parent)


def save_content(
    folder: CheckpointFolder, step: int, content: PreparedShare, *, identity: dict[str, Any]
) -> Path:
    """Commit a checkpoint that this process alone writes."""
    with folder.begin(step, num_bytes=content.num_bytes, identity=identity) as saving:
        return saving.commit(write_files(content.list_files(), saving.folder))


def save(folder: CheckpointFolder, step: int, size: int = 64) -> Path:
    """Save what the functions above make."""
    content = prepare_whole(make_model(step, size), make_optimizer(step), make_state(step), RECIPE)
    return save_content(folder, step, content, identity=IDENTITY)


def assert_loaded(loaded: Loaded | None, step: int, size: int = 64) -> None:
    """Asserts that all of it came back, bit for bit."""
    assert loaded is not None
    assert loaded.step == step
    assert_same(loaded.model, dict(sorted(make_model(step, size).items())))
    assert_same(loaded.optimizer, make_optimizer(step))
    assert_same(loaded.state, make_state(step))
    assert loaded.recipe_toml == RECIPE
    assert loaded.identity == IDENTITY


def assert_same(one: Any, other: Any) -> None:
    """Asserts the same types, order, shapes and bits."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        flat, flat_other = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
        assert torch.equal(flat, flat_other)
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert len(one) == len(other)
        for (key, item), (other_key, other_item) in zip(one.items(), other.items(), strict=True):
            assert_same(key, other_key)
            assert_same(item, other_item)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for item, other_item in zip(one, other, strict=True):
            assert_same(item, other_item)
    elif isinstance(one, float):
        assert math.isnan(one) == math.isnan(other)
        assert struct.pack(">d", one) == struct.pack(">d", other)
    else:
        assert one == other


def list_names(run: Path) -> list[str]:
    """Return names in the `checkpoints` folder, hidden ones included, the lock file left out."""
    return sorted(name for name in os.listdir(run / CHECKPOINTS) if name != LOCK)
