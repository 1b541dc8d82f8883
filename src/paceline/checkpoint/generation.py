"""Numbers the starts of a run, so that no older start commits a checkpoint after a newer one has begun.

    .generation-00000003         in the run's folder: the third start has begun

It needs no locks and no clock; of two starts, each may believe that the other has ended:

1. A start creates the next number. Creation is exclusive, also on NFS, so each number has one start.
2. It renames the temporary folders of all saves under way, so that their commits, which are renames, fail.
3. A save makes its temporary folder first, then looks for a newer number (`CheckpointFolder.refuse_older`).

If a save sees no newer number in 3, then its folder was there before the number in 1, so 2 finds it. A save
of an older start is therefore committed before 2 or not at all.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint import files
from paceline.checkpoint.folder_names import CHECKPOINTS, TMP, TRASH

PREFIX = ".generation-"
_NAME = re.compile(re.escape(PREFIX) + r"(\d{8,})")


def newest_generation(run_folder: Path) -> int:
    """Return the number of the newest start, 0 if none is known."""
    try:
        names = [path.name for path in run_folder.iterdir()]
    except FileNotFoundError:
        return 0
    return max((int(found[1]) for name in names if (found := _NAME.fullmatch(name))), default=0)


def begin_generation(run_folder: Path, least: int) -> int:
    """Begin a start of the run, and return its number; one process of a start calls it.

    Args:
        run_folder: which exists.

    Raises:
        OSError: the folder cannot be written to.
    """
    while True:
        number = max(newest_generation(run_folder) + 1, least)
        try:
            files.make_new_file(run_folder / f"{PREFIX}{number:08d}")
        except FileExistsError:
            continue
        # Another start may have begun meanwhile, and removed what this one has not seen.
        if newest_generation(run_folder) == number:
            break
    _remove_older(run_folder, number)
    _end_saves(run_folder / CHECKPOINTS)
    return number


def _remove_older(run_folder: Path, number: int) -> None:
    for path in run_folder.glob(f"{PREFIX}*"):
        found = _NAME.fullmatch(path.name)
        if found is not None and int(found[1]) < number:
            with suppress(OSError):
                files.remove(path)


def _end_saves(checkpoints: Path) -> None:
    for path in sorted(checkpoints.glob(f"{TMP}*")):
        trash = path.with_name(f"{TRASH}{path.name.removeprefix('.')}-{secrets.token_hex(4)}")
        try:
            files.rename(path, trash)
        except FileNotFoundError:  # committed, or given up
            continue
        with suppress(OSError):  # its writer may still add files; the next commit removes what is left
            files.remove(trash)
