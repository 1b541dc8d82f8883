"""The settings that a run's result depends on: saved with its checkpoints, compared when it is resumed.

They are a flat dict of JSON-able values by name, such as `clip_norm`, `optimizer.lr`, `schedule.T_max` or
`loader0.global_batch_size`. Optimizer and schedule are recorded as built, because loading a checkpoint
replaces their options (for example a learning rate that decays). The layout and the number of ranks are not
included, because they may change freely.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.data.loader import Loader
from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.phrases import name_some
from paceline.recipe import advise_accept, find_key

log = logging.getLogger(__name__)

Settings = dict[str, Any]
# The seed determines the order of samples. With another one, a saved position would mean other samples.
_FIXED = frozenset({"seed"})
# Options that choose an optimizer's kernels and do not change its formula.
_IMPLEMENTATION = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
# Entries of a schedule's state that are its position, or that follow from the optimizer.
_PROGRESS = frozenset({"last_epoch", "base_lrs", "lr_lambdas", "verbose"})


class BuiltOptimizer:
    """An optimizer and its schedule as the user's functions returned them, before any state was loaded.

    Args:
        optimizer: over parameters of the model.
        places: of the model's parameters by id, in the order of the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, places: Mapping[int, int]) -> None:
        self._optimizer = optimizer
        self._options = [_options(group) for group in optimizer.param_groups]
        # Groups may come in another order when a run is resumed.
        self._order = sorted(
            range(len(optimizer.param_groups)),
            key=lambda number: min(
                (places[id(p)] for p in optimizer.param_groups[number]["params"]), default=math.inf
            ),
        )

    def describe(self, schedule: Any) -> Settings:
        """Return the settings by name, before the first step.

        Args:
            schedule: built over the optimizer, or `None`.
        """
        now = [_options(group) for group in self._optimizer.param_groups]
        # Groups that differ only by their kernels depend on the layout, so they count as one.
        different = {repr((self._options[number], now[number])): number for number in reversed(self._order)}
        order = [number for number in self._order if number in different.values()]
        keys = dict.fromkeys(key for options in self._options for key in options)
        found = {f"optimizer.{key}": _gather(self._options, order, key) for key in keys}
        found["optimizer"] = type(self._optimizer).__name__
        found["schedule"] = None if schedule is None else type(schedule).__name__
        if schedule is not None:
            added = dict.fromkeys(key for options in now for key in options if key not in keys)
            found |= {f"schedule.{key}": _gather(now, order, key) for key in added if key != "initial_lr"}
            found |= {f"schedule.{key}": value for key, value in _describe_schedule(schedule.state_dict())}
        return found

    def advance(self, schedule: Any, num_steps: int) -> list[dict[str, Any]]:
        """Step the schedule `num_steps` times from the options as built; return each group's options."""
        if schedule is not None:
            with warnings.catch_warnings():  # torch warns if a schedule is stepped before its optimizer
                warnings.simplefilter("ignore")
                for _ in range(num_steps):
                    schedule.step()
        return [
            {key: value for key, value in group.items() if key not in _IMPLEMENTATION}
            for group in self._optimizer.param_groups
        ]

    def take(self, advanced: list[dict[str, Any]], changed: Collection[str]) -> None:
        """Replace loaded options by those as built, if the user has accepted the change.

        Args:
            advanced: what `advance` returned before loading.
            changed: names of the accepted changes, as in `describe`.
        """
        keys = {name.removeprefix("optimizer.") for name in changed}
        for group, options in zip(self._optimizer.param_groups, advanced, strict=True):
            group.update(
                {key: value for key, value in options.items() if key in keys or moves_schedule(changed)}
            )


def moves_schedule(changed: Collection[str]) -> bool:
    """Return whether the schedule as built replaces the saved one; it depends on the learning rate."""
    return "optimizer.lr" in changed or any(name.partition(".")[0] == "schedule" for name in changed)


def name_settings(model: str, models: Collection[str], key: str) -> str:
    """Return the full name of a model's setting; a single model's settings have no prefix."""
    return key if len(models) == 1 else f"{model}.{key}"


def describe_loader(loader: Loader) -> Settings:
    """Return a loader's part of a run's settings; reads some samples the first time."""
    return {
        f"{loader.name}.global_batch_size": loader.global_batch_size,
        f"{loader.name}.microbatch_size": loader.microbatch_size,
        f"{loader.name}.drop_last": loader.drop_last,
        f"{loader.name}.data": loader.content_hash,
    }


def list_changes(saved: Settings, here: Settings, loaders: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, with the old and the new value.

    Args:
        here: of this start; a loader is compared when it is made.
        loaders: names of this start's loaders.
    """
    found = {
        name: (saved.get(name), here.get(name))
        for name in dict.fromkeys([*saved, *here])
        if saved.get(name) != here.get(name)
    }
    for kind in [name for name in found if name.rpartition(".")[2] in ("optimizer", "schedule")]:
        for name in [name for name in found if name.startswith(f"{kind}.")]:
            del found[name]  # an option of another optimizer or schedule has no counterpart
        if kind.endswith("optimizer"):
            del found[kind]  # loading the state reports an optimizer of another kind
    for name in loaders:
        key = f"{name}.data"
        if key in found and None in found[key]:
            del found[key]  # unknown, or different at each read
    return found


def check_names(accept: Collection[str], known: Collection[str]) -> None:
    """Raise PL517 for a name that no setting has.

    Args:
        known: names of all settings of the checkpoint and of this start.
    """
    for name in accept:
        if not any(_covers(name, each) for each in known):
            raise PacelineError(
                "PL517",
                saw=f"accept={name!r}.",
                rule="accept= names settings that may differ from the checkpoint's: "
                f"{', '.join(sorted(known))}.",
                fix="Use these names, or the part before a dot for all that begin with it.",
            )


def refuse_changes(
    changes: Mapping[str, tuple[Any, Any]],
    accept: Collection[str],
    folder: Path | None,
    *,
    is_recipe: bool = False,
) -> list[str]:
    """Raise PL515 for changes that the user has not accepted, all in one message.

    Args:
        accept: names of settings, or of a part of them (`optimizer` for all of `optimizer.lr` and so on).
        is_recipe: whether a recipe is trained; a user then accepts changes by recipe key.

    Returns:
        The names of the changes that were accepted.
    """
    refused = [name for name in changes if name in _FIXED or not any(_covers(each, name) for each in accept)]
    if refused:
        shown = "; ".join(_describe_change(name, *changes[name]) for name in refused)
        fix = "Restore what it was, or choose another folder for a new run."
        if is_recipe:
            keys = [find_key(name) for name in refused]
            fix += "" if None in keys else advise_accept(key for key in keys if key is not None)
        elif not _FIXED & set(refused):
            fix += f" To go on with the new values from here: trainer.resume(folder, accept={refused!r})."
        raise PacelineError(
            "PL515",
            saw=f"the run in {folder} was trained with other settings: {shown}.",
            rule="They determine its result, so other values would make it another run.",
            fix=fix,
        )
    return list(changes)


def warn_fresh_objects(names: list[str]) -> None:
    """Log PL518 for tracked objects that a resumed run's checkpoint does not have."""
    finding = Finding(
        "PL518",
        ", ".join(names),
        "the checkpoint has no state for it.",
        "It starts in the middle of the run with the state that it was built with.",
        "Do nothing if it is new; otherwise track it under the name that it was saved with.",
    )
    log.warning("%s", finding)


def _covers(accepted: str, name: str) -> bool:
    return name == accepted or name.startswith(f"{accepted}.")


def _describe_change(name: str, old: Any, new: Any) -> str:
    if name.endswith(".data"):
        return f"the content of {name} is not what it was"
    if name.partition(".")[0] in ("tracked", "loaders"):
        kind, _, which = name.partition(".")
        return f"{which} was {'tracked' if kind == 'tracked' else 'a loader'} and is not"
    if isinstance(old, list) and name.rpartition(".")[2] == "frozen":
        sides = [(f"was {name}", old, new), (f"is {name}", new, old)]
        shown = [(what, sorted(set(one) - set(other))) for what, one, other in sides]
        return " and ".join(f"{name_some(names)} {what} at the build" for what, names in shown if names)
    return f"{name} was {old!r} and is {new!r}"


def _gather(options: list[dict[str, Any]], order: list[int], key: str) -> Any:
    values = [options[number].get(key) for number in order]
    return values[0] if all(value == values[0] for value in values) else values


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: _plain(value) for key, value in group.items() if key not in _IMPLEMENTATION}
    return {key: value for key, value in plain.items() if value is not _SKIP}


_SKIP = object()


def _plain(value: Any) -> Any:
    """Return a setting as a JSON value, or `_SKIP` if JSON has no such type."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return _SKIP if any(item is _SKIP for item in items) else items
    if isinstance(value, Mapping):  # MultiStepLR's milestones
        return [f"{key}: {value[key]}" for key in sorted(value, key=str)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return _SKIP


def _describe_schedule(state: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in state.items():
        if key == "_schedulers":
            for number, inner in enumerate(value):
                found += _describe_schedule(inner, f"{prefix}{number}.")
        elif key == "_milestones" or (key not in _PROGRESS and not key.startswith("_")):
            plain = _plain(value)
            if plain is not _SKIP:
                found.append((f"{prefix}{key.removeprefix('_')}", plain))
    return found
