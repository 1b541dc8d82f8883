"""Finds and reads checkpoints; changes nothing on disk."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.content import Stored, list_model, open_tree
from paceline.checkpoint.folder_names import CHECKPOINTS, list_checkpoints, step_of
from paceline.checkpoint.manifest import FILE_NAME, BadManifestError, read_manifest
from paceline.checkpoint.run_state import check_run_state, looks_like_a_run
from paceline.checkpoint.validity import is_usable, refuse_other_format, verify
from paceline.errors import PacelineError
from paceline.finding import Finding

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The content of a checkpoint, its tensors unread (`StoredTensor`).

    Attributes:
        path: its folder.
        step: the optimizer step after which it was taken.
        model: the model's tensors by name; tied names give one and the same tensor.
        optimizer: the tree that was saved.
        state: the tree that was saved.
        recipe_toml: the resolved recipe, where the run had one.
        identity: what the saving run was (see `identity.py`).
    """

    path: Path
    step: int
    model: dict[str, Any]
    optimizer: Any
    state: Any
    recipe_toml: str | None
    identity: dict[str, Any]


def find_newest(folder: Path) -> Path:
    """Return the newest valid checkpoint in a `checkpoints` folder that has at least one, valid or not.

    One process reads all of it; ranks share this out (`train/state/verified.py`).

    Args:
        folder: with the checkpoints. Newer ones that are not valid are logged.

    Raises:
        PacelineError: PL509 if none is valid, PL504 where the newest one is of another format. Nothing is
            deleted or changed.
    """
    skipped: list[tuple[Path, list[Finding]]] = []
    for path in reversed(list_checkpoints(folder).values()):
        findings = verify(path)
        refuse_other_format(findings)
        if is_usable(findings):
            return path
        skipped.append((path, findings))
        warn_of_skip(path, findings)
    raise no_valid_error(folder, skipped)


def warn_of_skip(path: Path, findings: list[Finding]) -> None:
    """Log why a checkpoint is not the one that is taken."""
    for finding in findings:
        logger.warning("%s", finding)
    logger.warning("%s is left out; trying the one before it", path)


def no_valid_error(folder: Path, skipped: Sequence[tuple[Path, list[Finding]]]) -> PacelineError:
    """Return PL509 for checkpoints that are all invalid, with their findings."""
    shown = " ".join(f"{path.name}: {findings[0].saw}" for path, findings in skipped)
    return PacelineError(
        "PL509",
        saw=f"{folder} has {len(skipped)} checkpoint(s), and none is valid. {shown}",
        rule="A run resumes only from a valid checkpoint; these stay as they are.",
        fix="Restore one from a copy, or start again with another --out.",
    )


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint that a path means: itself, or the newest valid one of a run's folder.

    Args:
        path: a checkpoint's folder, a run's, or the `checkpoints` in that.
    """
    found = list_at(path)
    if found == [Path(path)]:
        check_usable(found[0])
        return found[0]
    return find_newest(found[0].parent)


def find_best(path: str | Path) -> Path:
    """Return a run's checkpoint of the lowest value that `keep_best` was given."""
    newest = find_checkpoint(path)
    best = open_usable(newest).state["counters"].get("best")
    found = None if best is None else list_checkpoints(newest.parent).get(best[0])
    if found is None:
        raise PacelineError(
            "PL514",
            saw=f"{path} has no best checkpoint.",
            rule="A run keeps one by trainer.keep_best(value), or in a recipe by train.patience.",
            fix="Leave --best out for the newest one.",
        )
    check_usable(found)
    return found


def list_at(path: str | Path) -> list[Path]:
    """Return all checkpoints that a path means, valid or not, by rising step: itself, or those of a run."""
    path = Path(path)
    try:
        if (path / FILE_NAME).exists() or (step_of(path) is not None and path.is_dir()):
            return [path]
        for folder in (path / CHECKPOINTS, path):
            if found := list_checkpoints(folder):
                return list(found.values())
        saw = f"{path} has no checkpoint." if path.exists() else f"{path} does not exist."
    except OSError as error:  # no permission, or a name that is too long
        saw = f"{path} cannot be read: {error.strerror}."
    raise PacelineError(
        "PL514",
        saw=saw,
        rule="A checkpoint is a folder with a manifest.json, and a run's checkpoints are in its subfolder "
        "checkpoints.",
        fix="Give a run's folder (runs/demo) or one checkpoint (runs/demo/checkpoints/step-00000050).",
    )


def check_usable(path: Path) -> None:
    """Raise a `PacelineError` with the first finding that makes a checkpoint unusable."""
    findings = verify(path)
    refuse_other_format(findings)
    if not is_usable(findings):
        first = next(finding for finding in findings if not is_usable([finding]))
        raise PacelineError(first.code, saw=f"{path}: {first.saw}", rule=first.rule, fix=first.fix)


def list_trained(path: Path) -> set[str]:
    """Return the names of the trained tensors of a run's checkpoint, after checking its state.

    Raises:
        BadStateError: see `check_run_state`.
    """
    found = open_usable(path)
    if not looks_like_a_run(found.identity, found.state):
        return set()
    return check_run_state(found.step, found.model, found.optimizer, found.state)


def open_usable(path: Path) -> Loaded:
    """Open a checkpoint that `verify` has just found usable, its tensors unread (`StoredTensor`)."""
    try:
        manifest = read_manifest(path)
        stored = Stored(path)
        return Loaded(
            path=path,
            step=manifest.step,
            model=list_model(stored),
            optimizer=open_tree(stored, "optimizer"),
            state=open_tree(stored, "state"),
            recipe_toml=stored.read_recipe(),
            identity=manifest.identity,
        )
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable_error(path, error) from error
    except BadManifestError as error:  # a run that trains has removed it since
        raise unreadable_error(path, f"{FILE_NAME} {error}") from error


def unreadable_error(path: Path | str, error: Exception | str) -> PacelineError:
    """Return PL506 for a checkpoint whose hashes are right but whose files do not match each other."""
    # Another process changes it meanwhile, or no Paceline wrote it.
    return PacelineError(
        "PL506",
        saw=f"{path} cannot be read ({error}).",
        rule="The files of a checkpoint must match each other.",
        fix="Stop whatever writes there and try again, or use another checkpoint.",
    )
