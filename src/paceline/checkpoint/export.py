"""A checkpoint's weights as one plain file for other programs."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

import torch

from paceline.checkpoint import files
from paceline.checkpoint.full import read_model
from paceline.checkpoint.tensors import write_tensors
from paceline.errors import PacelineError


def export_model(checkpoint: Path, out: str | Path, dtype: torch.dtype | None = None) -> int:
    """Writes the model's tensors as plain safetensors, tied ones under each of their names.

    The file appears whole or not at all, and never in place of another.

    Args:
        checkpoint: one checkpoint's folder, already found valid.
        out: the file to write.
        dtype: convert floating-point tensors to it; the others stay as they are.

    Returns:
        The file's size in bytes.

    Raises:
        PacelineError: PL513 where `out` exists, PL508 where it can't be written.
    """
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise _exists(out)
    tensors = read_model(checkpoint)
    if dtype is not None:
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
    tmp = out.with_name(f".{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        try:
            record = write_tensors(tmp, tensors, keep_aliases=False)
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
            fix="Choose a folder that exists, that you may write to and that has room.",
        ) from error
    return record.num_bytes


def _publish(tmp: Path, out: Path) -> None:
    try:
        files.link(tmp, out)  # unlike a rename, never replaces a file that came up meanwhile
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
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
