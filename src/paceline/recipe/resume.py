"""Refuses a recipe that would make a resumed run another one, and accepts changes that the user names.

Two checks compare a run with the recipe that resumes it: `check_resumable` compares recipes, key by key, and
the trainer compares the settings that its checkpoint records (`train/settings.py`), such as `clip_norm` or
the learning rate as scaled. A user accepts changes by keys of the recipe (`--accept optimizer.lr`), for both.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.errors import PacelineError
from paceline.recipe.keys import RESUMABLE, SETTINGS
from paceline.recipe.schema import Recipe

# Keys that cannot be accepted, with the reason.
_FIXED = {"train.seed": "The seed determines the order of samples, so the saved position would mean others."}


def check_accepted(accept: Sequence[str], *recipes: Recipe) -> None:
    """Check the keys that a user accepts.

    Args:
        accept: keys, or sections, which stand for all of their keys.
        recipes: whose keys may be named.
    """
    keys = {key for recipe in recipes for key in _flatten(recipe)}
    known = keys | {_section(key) for key in keys}
    for key in accept:
        if key in _FIXED:
            raise PacelineError(
                "PL517",
                saw=f"--accept {key}.",
                rule=_FIXED[key],
                fix=f"Restore {key}, or choose another --out for a new run.",
            )
        if key not in known:
            close = difflib.get_close_matches(key, sorted(known), n=3)
            raise PacelineError(
                "PL517",
                saw=f"--accept {key}, which is not a key of the recipe.",
                rule="--accept names keys that may differ from those of the run, such as optimizer.lr, or "
                "sections, such as data.",
                fix=f"Did you mean {' or '.join(close)}?" if close else "See docs/recipe.md for all keys.",
            )


def list_settings(accept: Sequence[str]) -> list[str]:
    """Return the trainer's settings that accepted keys and sections stand for."""
    found = [name for each in SETTINGS if _concerns(accept, each.key) for name in each.names]
    if _concerns(accept, "train.global_batch_size"):
        found.append("optimizer.lr")  # may be scaled by the batch size
    return list(dict.fromkeys(found))


def find_key(setting: str) -> str | None:
    """Return the key or section of a recipe to accept for a setting of the trainer, or `None`."""
    for each in SETTINGS:
        follows = any(setting == name or setting.startswith(f"{name}.") for name in each.names)
        if follows and each.key not in _FIXED:
            return each.key
    return None


def _concerns(accept: Sequence[str], key: str) -> bool:
    """Return whether a key or section is accepted: by its name, by its section, or by a key in it."""
    return any(key == each or key.startswith(f"{each}.") or each.startswith(f"{key}.") for each in accept)


def list_changes(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two recipes differ, with the old and the new value (`None` if absent)."""
    before, after = _flatten(old), _flatten(new)
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def check_resumable(old: Recipe, new: Recipe, *, where: str, accept: Sequence[str] = ()) -> None:
    """Refuse to resume a run with a recipe that would make it another run.

    Args:
        where: the run's folder, for the message.
        accept: keys or sections that may differ, as for `check_accepted`.
    """
    check_accepted(accept, old, new)
    refused = {
        key: change
        for key, change in list_changes(old, new).items()
        if not {key, _section(key)} & RESUMABLE.keys()
        and (key in _FIXED or not {key, _section(key)} & set(accept))
    }
    if refused:
        shown = "; ".join(f"{key}: {old!r} there, {new!r} here" for key, (old, new) in refused.items())
        raise PacelineError(
            "PL530",
            saw=f"{where} holds a run of another recipe ({shown}).",
            rule="Resuming under other values would make it another run.",
            fix="Choose another --out for a new run, or restore these keys to resume this one."
            + ("" if _FIXED.keys() & refused.keys() else advise_accept(refused)),
        )


def advise_accept(keys: Iterable[str]) -> str:
    """Return the advice for a user who wants new values, to follow another sentence."""
    return f" To go on with the new values from here: --accept {','.join(dict.fromkeys(keys))}"


def _section(key: str) -> str:
    return key.partition(".")[0]


def _flatten(recipe: Recipe) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, table in recipe.model_dump(mode="json").items()
        for key, value in table.items()
    }
