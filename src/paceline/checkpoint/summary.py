"""Summarises a checkpoint from its manifest and headers, without reading tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.content import MODEL, Stored
from paceline.checkpoint.manifest import BadManifestError, OtherFormatError, read_manifest
from paceline.checkpoint.tensors import TensorInfo
from paceline.checkpoint.validity import verify
from paceline.finding import Finding


@dataclass(frozen=True)
class CheckpointSummary:
    """The summary of one checkpoint. What cannot be read is `None` or empty.

    Attributes:
        path: its folder.
        step: the optimizer step after which it was taken.
        num_bytes: size of all of its files.
        tensors: the model's tensors by name.
        loss: the training loss of that step, where the run stored one under `state["loss"]`.
        identity: what the saving run was.
        findings: what is wrong at first sight: `verify` without hashing the big files.
    """

    path: Path
    step: int | None
    num_bytes: int
    tensors: dict[str, TensorInfo]
    loss: float | None
    identity: dict[str, Any]
    findings: list[Finding]

    @property
    def num_parameters(self) -> int:
        """Floating-point numbers of the model, buffers included; tied ones count once."""
        return sum(
            info.num_elements
            for info in self.tensors.values()
            if info.alias_of is None and info.dtype.startswith(("F", "BF"))
        )


def summarize(path: Path) -> CheckpointSummary:
    """Return a `CheckpointSummary` of the checkpoint at `path`, broken or not."""
    step, identity = None, {}
    try:
        manifest = read_manifest(path)
        step, identity = manifest.step, manifest.identity
    except (BadManifestError, OtherFormatError):
        pass  # `findings` contains it.
    stored = Stored(path)
    return CheckpointSummary(
        path=path,
        step=step,
        num_bytes=_count_bytes(path),
        tensors=_list_tensors(stored),
        loss=_read_loss(stored),
        identity=identity,
        findings=verify(path, read_all=False),
    )


def _count_bytes(path: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
    except OSError:  # A running run has removed it meanwhile.
        return 0


def _list_tensors(stored: Stored) -> dict[str, TensorInfo]:
    try:
        return stored.list_tensors(MODEL)
    except (OSError, ValueError):
        return {}


def _read_loss(stored: Stored) -> float | None:
    try:
        state = stored.read_structure("state")
    except (OSError, ValueError):
        return None
    loss = state.get("loss") if isinstance(state, dict) else None
    return loss if isinstance(loss, float) else None
