"""Checks that a checkpoint is of the run, the models and the optimizers at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError


def check_optimizers(here: set[str], saved: set[str]) -> None:
    """Raise PL511 unless the same models have an optimizer.

    Args:
        here: names of the models that are updated.
        saved: names in the checkpoint.
    """
    if here != saved:
        raise PacelineError(
            "PL511",
            saw=f"the checkpoint has optimizer state for {', '.join(sorted(saved))}; here "
            f"{', '.join(sorted(here))} have an optimizer.",
            rule="A run must resume with the optimizers that it started with.",
            fix="Choose another run folder, or use an optimizer for the same models.",
        )


def check_model(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any]) -> None:
    """Raise PL531 for tensors of another model.

    Args:
        expected: shapes of the models' whole tensors by full name.
        tensors: of a checkpoint, whole, read or not.
    """
    problems = [f"{name} is missing" for name in expected.keys() - tensors.keys()]
    problems += [f"{name} is not in this model" for name in tensors.keys() - expected.keys()]
    problems += [
        f"{name} is {tuple(tensors[name].shape)} there and {expected[name]} here"
        for name in expected.keys() & tensors.keys()
        if tuple(tensors[name].shape) != expected[name]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5]) + (" ..." if len(problems) > 5 else "")
        raise PacelineError(
            "PL531",
            saw=f"the checkpoint is of another model: {shown}.",
            rule="A run must resume with the model that it started with.",
            fix="Choose another run folder, or build the model as it was.",
        )


def check_one_run(runs: Mapping[Path, str], folder: Path) -> None:
    """Raise PL526 where a run's folder has checkpoints of several runs.

    Args:
        runs: checkpoints with the ids of the runs that wrote them, by rising step.
    """
    by_run: dict[str, Path] = {run: path for path, run in runs.items()}
    if len(by_run) > 1:
        *_, other, newest = by_run.values()
        raise PacelineError(
            "PL526",
            saw=f"{folder} has checkpoints of {len(by_run)} runs: {newest.name} is not of the run that wrote "
            f"{other.name}.",
            rule="A run goes on from its own newest checkpoint, and removes its own old ones.",
            fix="Move the checkpoints of the other run elsewhere. To go on from a copied one, put it into a "
            "folder of its own.",
        )
