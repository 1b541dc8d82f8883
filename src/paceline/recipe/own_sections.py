"""The sections of a recipe for a model and data that functions of the user's own build."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from paceline.errors import PacelineError
from paceline.named import find_named
from paceline.phrases import first_line
from paceline.recipe.section import Section


class OwnModel(Section):
    """A model that a function of your own builds. `kind = "my.module:build"` is short for this kind with that
    `build`."""

    kind: Literal["own"]
    """`"own"`."""
    build: str
    """`MODULE:FUNCTION`, found from the working folder or among installed packages, or `FILE.py:FUNCTION`.
    It is called with the data (`vocab_size`, `tokens_per_sample`, `num_classes`, `image_shape`, each `None`
    where it does not apply) and `args`, and returns an `nn.Module`. With `text` and `masked_text` the module
    maps ids [B, T] to logits [B, T, V], with `digits` images [B, 1, 8, 8] to logits [B, 10]; with data of
    your own it gets a batch, or what the data's `forward` passes. Its code may change before a run is
    resumed: only `build` and `args` are compared."""
    args: dict[str, Any] = Field(default={})
    """Further arguments of the function, by name."""


class OwnData(Section):
    """Data sets that a function of your own builds. `kind = "my.module:build"` is short for this kind with
    that `build`."""

    kind: Literal["own"]
    """`"own"`."""
    build: str
    """As `build` of a model. It is called with `args`, and returns a dict: `train` and, if there is one,
    `valid` are data sets with a length; `loss` is (output, batch) to (sum, weight), and `forward`, if the
    model does not take a batch, (model, batch) to output, both as for `Trainer`; `metrics` are further means
    by name, as for `trainer.evaluate`."""
    args: dict[str, Any] = Field(default={})
    """Further arguments of the function, by name."""


def spell_out(table: dict[str, Any]) -> None:
    """Replace each section's `kind = "my.module:build"` by the kind `own` with this `build`, in place."""
    for name in ("model", "data"):
        section = table.get(name)
        kind = section.get("kind") if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(kind, str) and ":" in kind and "build" not in section:
            section.update(kind="own", build=kind)


def call_named(table: str, build: str, args: dict[str, Any], *more: Any) -> Any:
    """Return the result of the function that a recipe's table names."""
    try:
        function = find_named(build)
    except LookupError as error:
        raise named_error(table, str(error)) from error
    try:
        return function(*more, **args)
    except PacelineError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise named_error(table, f"{build} raised {type(error).__name__}: {first_line(error)}.") from error


def named_error(table: str, saw: str) -> PacelineError:
    """Return PL837 for a function that a recipe's table names."""
    return PacelineError(
        "PL837",
        saw=f"{table}.kind names a function: {saw}",
        rule="The function of [model] is called with the data and args and returns an nn.Module. That of "
        "[data] is called with args and returns a dict with train, loss and, if wanted, valid, forward and "
        "metrics.",
        fix="Correct the function or its name: MODULE:FUNCTION, found from the working folder, or "
        "FILE.py:FUNCTION.",
    )
