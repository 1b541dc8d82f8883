"""Exports a checkpoint's weights as one plain file for other programs."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import torch

from paceline.checkpoint import files
from paceline.checkpoint.content.protocol import stream_bytes
from paceline.checkpoint.load import open_usable
from paceline.checkpoint.tensors import DTYPE_NAMES, TensorInfo, stream_tensors
from paceline.errors import PacelineError


def export_model(checkpoint: Path, out: str | Path, dtype: torch.dtype | None = None) -> int:
    """Write the model's tensors as plain safetensors, tied ones under each of their names.

    The file appears whole or not at all, and never replaces another. It takes a few megabytes of memory.

    Args:
        checkpoint: one checkpoint's folder, already found valid.
        out: the file to write.
        dtype: convert floating-point tensors to it, complex ones from fp32 on; others stay as they are.

    Returns:
        The file's size in bytes.

    Raises:
        PacelineError: PL513 where `out` exists, PL508 where it cannot be written.
    """
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise _exists(out)
    tensors = open_usable(checkpoint).model
    types = {name: _choose(tensor.dtype, dtype) for name, tensor in tensors.items()}
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
        raise _exists(out) from None
    except OSError as error:
        raise PacelineError(
            "PL508",
            saw=f"Writing {out} failed: {error}.",
            rule="The file is written whole or not at all.",
            fix="Choose an existing folder with write permission and free space.",
        ) from error
    return record.num_bytes


def _choose(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
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


def _exists(out: Path) -> PacelineError:
    return PacelineError(
        "PL513",
        saw=f"{out} exists.",
        rule="An export never overwrites a file.",
        fix="Choose another name, or remove it first.",
    )
