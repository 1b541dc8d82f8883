"""Checks that a checkpoint is of the models and optimizers at hand."""

from __future__ import annotations

from collections.abc import Mapping
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
            rule="A run goes on with the optimizers it began with.",
            fix="Choose another run folder, or give the same models an optimizer.",
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
            rule="A run goes on with the model it began with.",
            fix="Choose another run folder, or build the model as it was.",
        )
