"""Claims a run's folder: checks that it belongs to this recipe, and that only one run writes to it.

Rank 0 holds a lock on `.lock` (flock) as long as it may write anything. The kernel drops the lock when the
process ends, in whatever way. The file's content only names the holder (`owner.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from paceline.errors import PacelineError
from paceline.recipe import Recipe, check_accepted, check_resumable, dump_recipe, load_recipe
from paceline.train.belongings import LOCK, RECIPE, check_belongings, folder_error
from paceline.train.state.owner import Owner, describe_owner, read_owner

log = logging.getLogger(__name__)

# Ranks that have lost their launcher leave within ten seconds; twice that and more
# for a machine that is busy.
_LEAVING_S = 30.0
# A process that only checks the folder holds the lock for an instant, and so does a run before it writes its
# name.
_LOOKING_S = 1.0
_held: weakref.WeakSet[TextIO] = weakref.WeakSet()


def claim_run_folder(
    folder: Path, recipe: Recipe, *, accept: Sequence[str] = (), launcher_pid: int | None = None
) -> TextIO:
    """Create the folder if necessary, lock it, and check that it is for this recipe.

    Rank 0 calls it. Nothing is written into a folder that is refused. If the launcher of an earlier start
    was killed, its ranks save and leave, and this function waits for them.

    Args:
        accept: keys of the recipe that may differ from those of the run in the folder.
        launcher_pid: of the process that started the ranks; by default the parent of this one.

    Returns:
        The open lock file; the folder is free again when it is closed or the process has ended.
    """
    check_belongings(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Follow no link, and do not block in case it has just become a pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.fdopen(os.open(folder / LOCK, flags, 0o644), "a", encoding="utf-8")
    except OSError as error:
        raise folder_error(f"{folder} cannot be written to: {error.strerror}.") from None
    try:
        _take_lock(lock, folder)
        _held.add(lock)
        _check_recipe(folder, recipe, accept)
        # The owner comes first: it makes the folder count as a run's.
        _write_owner(lock, folder, describe_owner(launcher_pid))
        _write_recipe(folder / RECIPE, recipe)
    except BaseException:
        with contextlib.suppress(OSError):  # buffered text that does not fit on a full disk
            lock.close()
        raise
    return lock


def _check_recipe(folder: Path, recipe: Recipe, accept: Sequence[str]) -> None:
    if (folder / RECIPE).exists():
        old = load_recipe(folder / RECIPE)
        check_resumable(old, recipe, where=str(folder), accept=accept)
    else:
        check_accepted(accept, recipe)


def check_run_folder(folder: Path, recipe: Recipe, accept: Sequence[str] = ()) -> None:
    """Run the checks of `claim_run_folder` that are possible before ranks start, without changing anything.

    Like that function, it waits for the ranks of a start whose launcher was killed.
    """
    check_belongings(folder)
    _check_recipe(folder, recipe, accept)
    # An unreadable lock file belongs to another user, and so does the folder: `claim_run_folder` refuses it.
    if os.access(folder / LOCK, os.R_OK):
        with (folder / LOCK).open("r", encoding="utf-8") as lock:
            _take_lock(lock, folder)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    is_utf8 = os.fsencode(folder.absolute()).decode(errors="replace") == str(folder.absolute())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK) or not is_utf8:
        reason = f"because of {nearest}" if is_utf8 else "because safetensors takes names in UTF-8 alone"
        raise folder_error(f"{folder} cannot be made or written to, {reason}.")


def _take_lock(lock: TextIO, folder: Path) -> None:
    """Lock the file, waiting for an owner that is about to leave; raise at once if another run uses it."""
    begin_s = time.monotonic()
    has_logged = False
    while not _try_lock(lock):
        owner = read_owner(folder / LOCK)
        leaving = owner is not None and owner.has_lost_launcher()
        patience_s = _LEAVING_S if leaving else _LOOKING_S if owner is None else 0.0
        if time.monotonic() - begin_s >= patience_s:
            raise _in_use(folder, owner, leaving)
        if leaving and not has_logged:
            has_logged = True
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
    """Release the locks in a forked loader worker, which may outlive a killed rank for seconds.

    (Record locks are not inherited, but this process would drop them whenever it opens and closes the file.)
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
    who = "an unknown process" if owner is None else f"process {owner.pid} on {owner.host}"
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
