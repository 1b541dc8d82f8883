"""Finding and reading checkpoints; nothing on disk changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import full
from paceline.checkpoint.manifest import FILE_NAME, read_manifest
from paceline.checkpoint.names import CHECKPOINTS, list_checkpoints, step_of
from paceline.checkpoint.tensors import UnreadableTensorsError
from paceline.checkpoint.verify import NEWER_FORMAT, is_usable, verify
from paceline.errors import PacelineError
from paceline.finding import Finding

logger = logging.getLogger(__name__)

OnSkip = Callable[[Path, list[Finding]], None]


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds; all tensors are on the CPU.

    Attributes:
        path: its folder.
        step: the optimizer step after which it was taken.
        model: the model's tensors by name; tied names give one and the same tensor.
        optimizer: the tree that was saved (see `optimizer.py`).
        state: the tree that was saved.
        recipe_toml: the resolved recipe, where the run had one.
        identity: what the saving run was (see `identity.py`).
    """

    path: Path
    step: int
    model: dict[str, torch.Tensor]
    optimizer: Any
    state: Any
    recipe_toml: str | None
    identity: dict[str, Any]


def find_newest(folder: Path, on_skip: OnSkip | None = None) -> Path:
    """The newest valid checkpoint in a `checkpoints` folder that has at least one, valid or not.

    Raises:
        PacelineError: as `CheckpointFolder.load_newest`.
    """
    skipped: list[tuple[Path, list[Finding]]] = []
    for path in reversed(list_checkpoints(folder).values()):
        findings = verify(path)
        refuse_newer(findings)
        if is_usable(findings):
            return path
        skipped.append((path, findings))
        if on_skip is not None:
            on_skip(path, findings)
        else:
            logger.warning("skipping %s: %s", path, "; ".join(finding.saw for finding in findings))
    shown = " ".join(f"{path.name}: {findings[0].saw}" for path, findings in skipped)
    raise PacelineError(
        "PL509",
        saw=f"{folder} has {len(skipped)} checkpoint(s), and none is valid. {shown}",
        rule="A run goes on only from a checkpoint that is whole; these stay as they are.",
        fix="Restore one from a copy, or start again with another --out.",
    )


def find_checkpoint(path: str | Path, on_skip: OnSkip | None = None) -> Path:
    """The checkpoint that a path means: itself, or the newest valid one of a run's folder.

    Args:
        path: a checkpoint's folder, a run's, or the `checkpoints` in that.
        on_skip: as in `CheckpointFolder.load_newest`.

    Raises:
        PacelineError: PL514 where there is none, PL509 where none is valid, PL504 for a newer format.
    """
    found = list_at(path)
    if found == [Path(path)]:
        check_usable(found[0])
        return found[0]
    return find_newest(found[0].parent, on_skip)


def list_at(path: str | Path) -> list[Path]:
    """All checkpoints that a path means, valid or not, by rising step: itself, or those of a run.

    Raises:
        PacelineError: PL514 where there is none.
    """
    path = Path(path)
    try:
        if (path / FILE_NAME).exists() or (step_of(path) is not None and path.is_dir()):
            return [path]
        for folder in (path / CHECKPOINTS, path):
            if found := list_checkpoints(folder):
                return list(found.values())
        saw = f"{path} holds no checkpoint." if path.exists() else f"{path} does not exist."
    except OSError as error:  # no permission, or a name that is too long
        saw = f"{path} can't be looked at: {error.strerror}."
    raise PacelineError(
        "PL514",
        saw=saw,
        rule="A checkpoint is a folder with a manifest.json, and a run's are in its folder checkpoints.",
        fix="Give a run's folder (runs/demo) or one checkpoint (runs/demo/checkpoints/step-00000050).",
    )


def load_checkpoint(path: str | Path) -> Loaded:
    """Checks every hash of one checkpoint and reads it.

    Raises:
        PacelineError: the first finding of `verify` that makes it unusable.
    """
    path = Path(path)
    check_usable(path)
    return read(path)


def check_usable(path: Path) -> None:
    """Raises a `PacelineError` with the first finding that makes a checkpoint unusable."""
    findings = verify(path)
    refuse_newer(findings)
    if not is_usable(findings):
        first = next(finding for finding in findings if not is_usable([finding]))
        raise PacelineError(first.code, saw=f"{path}: {first.saw}", rule=first.rule, fix=first.fix)


def read(path: Path) -> Loaded:
    """Reads a checkpoint that `verify` has just found usable."""
    manifest = read_manifest(path)
    try:
        return Loaded(
            path=path,
            step=manifest.step,
            model=full.read_model(path),
            optimizer=full.read_tree(path, "optimizer"),
            state=full.read_tree(path, "state"),
            recipe_toml=full.read_recipe(path),
            identity=manifest.identity,
        )
    except (OSError, UnreadableTensorsError, ValueError) as error:
        # Its hashes are right, so someone changes it while we read, or no Paceline wrote it.
        raise PacelineError(
            "PL506",
            saw=f"{path} can't be read ({error}).",
            rule="The files of a checkpoint fit together.",
            fix="Stop whatever writes there and try again, or use another checkpoint.",
        ) from error


def refuse_newer(findings: list[Finding]) -> None:
    """Raises PL504 if that is among the findings."""
    for finding in findings:
        if finding.code == NEWER_FORMAT:
            # Not skipped like a broken one: going on from an older step would throw work away.
            saw = f"{finding.where}: {finding.saw}"
            raise PacelineError(finding.code, saw=saw, rule=finding.rule, fix=finding.fix)
