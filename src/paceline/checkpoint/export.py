"""Exports a checkpoint's weights as one plain file for other programs."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import files
from paceline.checkpoint.content import stream_bytes
from paceline.checkpoint.load import Loaded, open_usable
from paceline.checkpoint.tensors import DTYPE_NAMES, TensorInfo, stream_tensors
from paceline.errors import PacelineError


def export_model(
    checkpoint: Path, out: str | Path, dtype: torch.dtype | None = None, average: str | None = None
) -> int:
    """Write the model's tensors as plain safetensors, tied ones under each of their names.

    The file appears whole or not at all, and never replaces another. It takes a few megabytes of memory.

    Args:
        checkpoint: one checkpoint's folder, already found valid.
        dtype: convert floating-point tensors to it, complex ones from fp32 on; others stay as they are.
        average: name of a tracked average of weights to write in place of the weights.

    Returns:
        The file's size in bytes.
    """
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise exists_error(out)
    tensors = open_for_export(checkpoint, average)
    types = {name: choose_type(tensor.dtype, dtype) for name, tensor in tensors.items()}
    infos = {name: TensorInfo(DTYPE_NAMES[types[name]], tensor.shape) for name, tensor in tensors.items()}

    def read(name: str) -> Iterator[memoryview]:
        return stream_bytes(tensors[name], lambda block: block.to(types[name]))

    tmp = out.with_name(f".{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        try:
            record = stream_tensors(tmp, infos, {}, read)
            _publish(tmp, out)
            files.sync_folder(out.parent)
        finally:
            with contextlib.suppress(OSError):
                files.remove(tmp)
    except FileExistsError:
        raise exists_error(out) from None
    except OSError as error:
        raise PacelineError(
            "PL508",
            saw=f"Writing {out} failed: {error}.",
            rule="The file is written whole or not at all.",
            fix="Choose an existing folder with write permission and free space.",
        ) from error
    return record.num_bytes


def open_for_export(checkpoint: Path, average: str | None) -> dict[str, Any]:
    """Return the model's tensors by name, unread, or an average of weights in their place; raise PL514."""
    loaded = open_usable(checkpoint)
    return loaded.model if average is None else _replace_by_average(loaded, average)


def _replace_by_average(loaded: Loaded, average: str) -> dict[str, Any]:
    """Return the model's tensors with the average in place of the parameters, tied ones included."""
    tracked = loaded.state["tracked"]
    found = tracked.get(average)
    if not isinstance(found, dict) or found.keys() != {"num_averaged", "parameters"}:
        raise PacelineError(
            "PL514",
            saw=f"{loaded.path} has no average of weights named {average!r}; it tracks "
            f"{', '.join(sorted(tracked)) or 'nothing'}.",
            rule="Trainer(ema=0.999) keeps one, under the name average.",
            fix="Leave --average out for the weights themselves.",
        )
    if not found["num_averaged"]:
        return loaded.model
    # With several models, a parameter's full name begins with the model's.
    prefix = f"{average.removeprefix('average of ')}." if average.startswith("average of ") else ""
    by_name = {loaded.model[prefix + name].name: tensor for name, tensor in found["parameters"].items()}
    return {name: by_name.get(tensor.name, tensor) for name, tensor in loaded.model.items()}


def choose_type(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the type in which a tensor is written, see `export_model`."""
    if wanted is not None and dtype.is_complex and wanted.itemsize >= torch.float32.itemsize:
        return wanted.to_complex()
    return dtype if wanted is None or not dtype.is_floating_point else wanted


def _publish(tmp: Path, out: Path) -> None:
    try:
        files.link(tmp, out)  # Unlike a rename, this never replaces a file that has appeared meanwhile.
    except FileExistsError:
        raise
    except OSError:  # A file system without hard links.
        if out.exists():
            raise FileExistsError(str(out)) from None
        files.rename(tmp, out)


def exists_error(out: Path) -> PacelineError:
    """Return the error of an export onto something that is there."""
    return PacelineError(
        "PL513",
        saw=f"{out} exists.",
        rule="An export never overwrites a file.",
        fix="Choose another name, or remove it first.",
    )
