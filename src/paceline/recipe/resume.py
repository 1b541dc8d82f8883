"""Lists the keys of a recipe that may change when a run is resumed."""

from __future__ import annotations

from typing import Any

from paceline.errors import PacelineError
from paceline.recipe.schema import Recipe

# Keys (or whole sections) that may change between two starts of one run, each because it does not change the
# meaning of the steps already taken. Everything else defines the run.
RESUMABLE: dict[str, str] = {
    "train.steps": "a run may be made longer or shorter; the schedule is then that of the new length",
    "train.epochs": "as train.steps",
    "train.eval_every": "looking does not change the run",
    "train.eval_samples": "looking does not change the run",
    "train.max_skipped_in_a_row": "a limit, not a part of the arithmetic",
    "train.reduction": "changes last bits only, and resuming says so",
    "train.threads_per_rank": "changes last bits only, and resuming says so",
    "train.device": "changes last bits only, and resuming says so",
    "train.compile": "changes last bits only",
    "train.timeout_s": "a limit, not a part of the arithmetic",
    "layout": "the same numbers on any layout",
    "ddp": "speed only",
    "shard.reshard_after_forward": "memory and speed only",
    "shard.prefetch": "memory and speed only",
    "shard.offload_folder": "where files lie",
    "loader": "speed only",
    "checkpoint": "what is kept, not what is computed",
    "metrics": "what is written, not what is computed",
    "data.cache_dir": "where files lie",
}


def list_changes(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two recipes differ, with the old and the new value (`None` if absent)."""
    before, after = _flatten(old), _flatten(new)
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def check_resumable(old: Recipe, new: Recipe, *, where: str) -> None:
    """Refuse to resume a run with a recipe that would make it another run.

    Args:
        where: the run's folder, for the message.

    Raises:
        PacelineError: PL530, with every difference that is not in `RESUMABLE`.
    """
    refused = {
        key: change
        for key, change in list_changes(old, new).items()
        if key not in RESUMABLE and key.split(".")[0] not in RESUMABLE
    }
    if refused:
        shown = "; ".join(f"{key}: {old!r} there, {new!r} here" for key, (old, new) in refused.items())
        raise PacelineError(
            "PL530",
            saw=f"{where} holds a run of another recipe ({shown}).",
            rule="Resuming under other values would make it another run.",
            fix="Choose another --out for a new run, or restore these keys to resume this one.",
        )


def _flatten(recipe: Recipe) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, table in recipe.model_dump(mode="json").items()
        for key, value in table.items()
    }
