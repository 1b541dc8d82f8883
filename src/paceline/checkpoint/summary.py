"""What a checkpoint holds, told from its manifest and headers, without reading tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import full
from paceline.checkpoint.manifest import BadManifestError, NewerFormatError, read_manifest
from paceline.checkpoint.tensors import TensorInfo, UnreadableTensorsError, read_infos
from paceline.checkpoint.verify import verify
from paceline.finding import Finding


@dataclass(frozen=True)
class CheckpointSummary:
    """One checkpoint at a glance. What can't be read is `None` or empty.

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
    """A `CheckpointSummary` of the checkpoint at `path`, broken or not."""
    step, identity = None, {}
    try:
        manifest = read_manifest(path)
        step, identity = manifest.step, manifest.identity
    except (BadManifestError, NewerFormatError):
        pass  # `findings` says so
    try:
        tensors = read_infos(path / full.MODEL)
    except UnreadableTensorsError:
        tensors = {}
    return CheckpointSummary(
        path=path,
        step=step,
        num_bytes=_count_bytes(path),
        tensors=tensors,
        loss=_read_loss(path),
        identity=identity,
        findings=verify(path, read_all=False),
    )


def _count_bytes(path: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
    except OSError:  # a running run let go of it meanwhile
        return 0


def _read_loss(path: Path) -> float | None:
    try:
        state = json.loads((path / "state.json").read_bytes())
    except (OSError, ValueError):
        return None
    loss = state.get("loss") if isinstance(state, dict) else None
    return loss if isinstance(loss, float) else None
