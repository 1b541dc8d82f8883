"""A run's folder: whose it is, and that only one run writes to it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TextIO

from paceline.errors import PacelineError
from paceline.recipe import Recipe, check_resumable, dump_recipe, load_recipe


def claim_run_folder(folder: Path, recipe: Recipe) -> TextIO:
    """Makes the folder if need be, checks that it is for this recipe, and locks it.

    Rank 0 calls it. Nothing is written into a folder that is refused.

    Returns:
        The open lock file; the folder is free again when it is closed or the process is gone.

    Raises:
        PacelineError: PL530 holds a run of another recipe, PL532 not writable, PL533 in use.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise PacelineError(
            "PL532",
            saw=f"{folder} can't be written to: {error.strerror}.",
            rule="A run's folder holds its checkpoints and metrics.",
            fix="Choose another folder with --out, or change its permissions.",
        ) from None
    if not _try_lock(lock):
        lock.close()
        raise _in_use(folder)
    try:
        _check_or_write_recipe(folder / "recipe.toml", recipe)
    except BaseException:
        lock.close()
        raise
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def check_run_folder(folder: Path, recipe: Recipe) -> None:
    """The checks of `claim_run_folder` that can be made before ranks start, changing nothing."""
    if (folder / "recipe.toml").exists():
        check_resumable(load_recipe(folder / "recipe.toml"), recipe, where=str(folder))
    if (folder / ".lock").exists():
        with (folder / ".lock").open("r", encoding="utf-8") as lock:
            if not _try_lock(lock):
                raise _in_use(folder)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise PacelineError(
            "PL532",
            saw=f"{folder} can't be made or written to, because of {nearest}.",
            rule="A run's folder holds its checkpoints and metrics.",
            fix="Choose another folder with --out, or change its permissions.",
        )


def _try_lock(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _in_use(folder: Path) -> PacelineError:
    owner = (folder / ".lock").read_text(encoding="utf-8").strip() or "unknown"
    return PacelineError(
        "PL533",
        saw=f"{folder} is in use by another run (process {owner}).",
        rule="Two runs in one folder would overwrite each other's checkpoints.",
        fix="Wait for it to end, or choose another folder with --out.",
    )


def _check_or_write_recipe(path: Path, recipe: Recipe) -> None:
    if path.exists():
        check_resumable(load_recipe(path), recipe, where=str(path.parent))
    partial = path.with_name(".recipe.toml.partial")
    try:
        partial.write_text(dump_recipe(recipe), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise PacelineError(
            "PL532",
            saw=f"{path} can't be written: {error.strerror}.",
            rule="A run's folder says what the run is.",
            fix="Free some space, or choose another folder with --out.",
        ) from None
