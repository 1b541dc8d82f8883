"""A run's folder: whose it is, and that only one run writes to it.

Rank 0 holds a lock on `.lock` (flock) as long as it may write anything; the kernel drops it when the
process ends, however that happens. What is in the file only says who that is (`owner.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import weakref
from pathlib import Path
from typing import TextIO

from paceline.errors import PacelineError
from paceline.recipe import Recipe, check_resumable, dump_recipe, load_recipe
from paceline.train.belongings import LOCK, RECIPE, check_belongings
from paceline.train.owner import Owner, describe_owner, read_owner

log = logging.getLogger(__name__)

# Ranks that have lost their launcher leave within ten seconds (launch/rank.py); twice that and more
# for a machine that is busy.
_LEAVING_S = 30.0
# Someone who only looks holds the lock for an instant, and so does one who has not written his name yet.
_LOOKING_S = 1.0
_held: weakref.WeakSet[TextIO] = weakref.WeakSet()


def claim_run_folder(folder: Path, recipe: Recipe, *, launcher_pid: int | None = None) -> TextIO:
    """Makes the folder if need be, checks that it is for this recipe, and locks it.

    Rank 0 calls it. Nothing is written into a folder that is refused. Ranks of an earlier start whose
    launcher was killed are waited for: they save and leave.

    Args:
        folder: the run's folder.
        recipe: what the run is.
        launcher_pid: of the process that started the ranks; by default the parent of this one.

    Returns:
        The open lock file; the folder is free again when it is closed or the process is gone.

    Raises:
        PacelineError: PL520 and PL521 something else than a run's folder, PL530 a run of another recipe,
            PL532 not writable, PL533 in use.
    """
    check_belongings(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not through a link, and not waiting where it became a pipe just now.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.fdopen(os.open(folder / LOCK, flags, 0o644), "a", encoding="utf-8")
    except OSError as error:
        raise PacelineError(
            "PL532",
            saw=f"{folder} cannot be written to: {error.strerror}.",
            rule="A run's folder holds its checkpoints and metrics.",
            fix="Choose another folder with --out, or change its permissions.",
        ) from None
    try:
        _take_lock(lock, folder)
        _held.add(lock)
        if (folder / RECIPE).exists():
            check_resumable(load_recipe(folder / RECIPE), recipe, where=str(folder))
        # First, because from here on the folder counts as a run's.
        _write_owner(lock, folder, describe_owner(launcher_pid))
        _write_recipe(folder / RECIPE, recipe)
    except BaseException:
        with contextlib.suppress(OSError):  # what a full disk has not taken
            lock.close()
        raise
    return lock


def check_run_folder(folder: Path, recipe: Recipe) -> None:
    """The checks of `claim_run_folder` that can be made before ranks start, changing nothing.

    It waits as that does for the ranks of a start whose launcher was killed.
    """
    check_belongings(folder)
    if (folder / RECIPE).exists():
        check_resumable(load_recipe(folder / RECIPE), recipe, where=str(folder))
    # One that this user may not read is another user's, and so is the folder: `claim_run_folder` will refuse.
    if os.access(folder / LOCK, os.R_OK):
        with (folder / LOCK).open("r", encoding="utf-8") as lock:
            _take_lock(lock, folder)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise PacelineError(
            "PL532",
            saw=f"{folder} cannot be made or written to, because of {nearest}.",
            rule="A run's folder holds its checkpoints and metrics.",
            fix="Choose another folder with --out, or change its permissions.",
        )


def _take_lock(lock: TextIO, folder: Path) -> None:
    """Locks the file, waiting for owners that are about to leave; refuses at once where one goes on."""
    begin_s = time.monotonic()
    has_told = False
    while not _try_lock(lock):
        owner = read_owner(folder / LOCK)
        leaving = owner is not None and owner.has_lost_launcher()
        patience_s = _LEAVING_S if leaving else _LOOKING_S if owner is None else 0.0
        if time.monotonic() - begin_s >= patience_s:
            raise _in_use(folder, owner, leaving)
        if leaving and not has_told:
            has_told = True
            assert owner is not None
            log.warning(
                "waiting for rank 0 of an earlier start in %s (process %d), whose launcher has ended, to "
                "save and exit",
                folder,
                owner.pid,
            )
        time.sleep(0.05)


def _try_lock(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # ENOLCK, ENOTSUP, ENOSYS: some network file systems have no locks
        return True
    return True


def _let_go_in_child() -> None:
    """A forked loader worker may outlive a killed rank for seconds, and must not go on holding its lock.

    (Record locks are not inherited, but any look at the file by this process itself would drop them.)
    """
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)


def _write_owner(lock: TextIO, folder: Path, owner: Owner) -> None:
    try:
        lock.truncate(0)
        lock.write(owner.dump())
        lock.flush()
    except OSError as error:
        raise _unwritable(folder / LOCK, error) from None


def _in_use(folder: Path, owner: Owner | None, leaving: bool) -> PacelineError:
    who = "an unknown process" if owner is None else f"process {owner.pid}"
    fix = "Wait for it to end, or choose another folder with --out."
    if leaving:
        assert owner is not None
        fix = f"Its launcher has ended and it still runs after {_LEAVING_S:.0f} s: kill -9 {owner.pid}"
    return PacelineError(
        "PL533",
        saw=f"{folder} is in use by another run ({who}).",
        rule="Two runs in one folder would overwrite each other's checkpoints.",
        fix=fix,
    )


def _write_recipe(path: Path, recipe: Recipe) -> None:
    partial = path.with_name(".recipe.toml.partial")
    try:
        partial.write_text(dump_recipe(recipe), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> PacelineError:
    return PacelineError(
        "PL532",
        saw=f"{path} cannot be written: {error.strerror}.",
        rule="A run's folder has its recipe.",
        fix="Free space, or choose another folder with --out.",
    )
