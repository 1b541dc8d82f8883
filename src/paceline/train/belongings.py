"""Checks which files a run's folder holds, and that it stays the folder that the run began in.

A run replaces or shortens files of certain names. It therefore begins only in a folder that already is a
run's, or that has no files of these names.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from paceline.checkpoint.folder_names import CHECKPOINTS, list_checkpoints
from paceline.checkpoint.manifest import FILE_NAME
from paceline.errors import PacelineError
from paceline.recipe import dump_recipe, load_recipe

LOCK = ".lock"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
UPDATES = "updates.jsonl"
RECIPE = "recipe.toml"
_FOLDERS = (CHECKPOINTS, "logs", "tensorboard")
# Keys of every row of metrics. Rows of another program are unlikely to have all of them.
_ROW_KEYS = {"step", "epoch", "samples", "step_s", "data_s", "comm_s"}
# First bytes of a run's lock file (`Owner.dump`).
_OWNER = b'{"host"'


def check_belongings(folder: Path, written: Sequence[str] = (RECIPE, METRICS, EVALUATIONS, UPDATES)) -> None:
    """Check that a run may write into a folder, without changing anything.

    Args:
        folder: the run's folder, or one to be made.
        written: the files that the run is going to replace.
    """
    try:
        _check(folder, written)
    except OSError as error:
        raise folder_error(f"{error.filename or folder} cannot be read: {error.strerror}.") from None


def folder_error(saw: str) -> PacelineError:
    """Return PL532, for a folder that no run can use."""
    return PacelineError(
        "PL532",
        saw=saw,
        rule="A run's folder holds its checkpoints and metrics.",
        fix="Choose another folder with --out, or change its permissions.",
    )


def _check(folder: Path, written: Sequence[str]) -> None:
    if folder.is_symlink() and not folder.exists():
        raise _wrong_kind(
            folder, f"is a symbolic link to {os.readlink(folder)}, which does not exist", "folder"
        )
    for name in (LOCK, *written):
        _check_kind(folder / name, "file", follows_links=name != LOCK)
    for name in _FOLDERS:
        _check_kind(folder / name, "folder", follows_links=True)
    found = [name for name in written if _is_filled(folder / name)]
    if _is_filled(folder / LOCK) and not _is_owner(folder / LOCK):
        found.append(LOCK)
    if found and not _is_run(folder):
        raise _foreign(folder, found)


def _is_run(folder: Path) -> bool:
    checkpoints = list_checkpoints(folder / CHECKPOINTS).values()
    return (
        _is_owner(folder / LOCK)
        or any((path / FILE_NAME).exists() for path in checkpoints)
        or _has_rows(folder / METRICS)
        or _is_resolved(folder / RECIPE)
    )


def _is_owner(lock: Path) -> bool:
    try:
        with lock.open("rb") as stream:
            return stream.read(len(_OWNER)) == _OWNER
    except FileNotFoundError:
        return False


def _has_rows(path: Path) -> bool:
    """Return whether a file begins with a row of a run, or with the torn first row of a killed one."""
    try:
        with path.open("rb") as stream:
            line = stream.readline(1 << 16)
    except FileNotFoundError:
        return False
    if not line.endswith(b"\n"):
        return line.startswith(b'{"step": ')
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and row.keys() >= _ROW_KEYS


def _is_resolved(path: Path) -> bool:
    """Return whether a recipe is as a run writes it, so that replacing it loses nothing a person wrote."""
    try:
        return dump_recipe(load_recipe(path)) == path.read_text(encoding="utf-8")
    except PacelineError:  # there is none, or it is no recipe
        return False


def _is_filled(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _check_kind(path: Path, expected: str, *, follows_links: bool) -> None:
    try:
        mode = os.stat(path, follow_symlinks=follows_links).st_mode
    except FileNotFoundError:
        if path.is_symlink():
            link = os.readlink(path)
            raise _wrong_kind(path, f"is a symbolic link to {link}, which does not exist", expected) from None
        return
    if (stat.S_ISREG if expected == "file" else stat.S_ISDIR)(mode):
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFREG: "a file"}
    kinds |= {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    raise _wrong_kind(path, f"is {kinds.get(stat.S_IFMT(mode), 'a device')}", expected)


def _wrong_kind(path: Path, what: str, expected: str) -> PacelineError:
    return PacelineError(
        "PL521",
        saw=f"{path} {what}.",
        rule=f"A run makes a {expected} of this name in its folder and writes only to that."
        if expected == "file" or path.name in _FOLDERS
        else "A run makes its folder, or uses an existing one.",
        fix="Choose another folder for the run (--out), or remove it.",
    )


def _foreign(folder: Path, names: Sequence[str]) -> PacelineError:
    shown = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return PacelineError(
        "PL520",
        saw=f"{folder} is not a run's folder, and it has {shown}.",
        rule="A run would replace these files.",
        fix="Choose a new folder for the run (--out), such as runs/demo.",
    )


class OpenFolder:
    """A run's folder, held open so that its renaming or removal is noticed.

    Args:
        path: of the folder; later changes of the working directory do not matter.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._absolute = path.absolute()
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._first_place = self._find_place()

    def check(self) -> None:
        """Raise PL522 if the path now leads to another folder, or to none."""
        try:
            now = os.stat(self._absolute)
        except OSError:
            now = None
        held = os.fstat(self._fd)
        if now is not None and os.path.samestat(now, held):
            return
        place = self._find_place()
        # Some network file systems change a folder's inode number; the kernel knows the open one's path.
        if now is not None and place is not None and place == self._first_place:
            return
        gone = held.st_nlink == 0 or (place or "").endswith(" (deleted)")
        where = (
            "It was removed." if gone else f"It was renamed to {place}." if place else "It was moved away."
        )
        raise PacelineError(
            "PL522",
            saw=f"{self.path} is no longer the folder that this run started in. {where}",
            rule="A run keeps its recipe, metrics and checkpoints in one folder.",
            fix="Start the run again; its checkpoints were lost with the folder."
            if gone
            else "Rename it back, or start again with the new path; the run continues from its last "
            "checkpoint.",
        )

    def close(self) -> None:
        """Release the folder."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def _find_place(self) -> str | None:
        """Return the present path of the open folder, or `None` if the system does not report it."""
        try:
            return os.readlink(f"/proc/self/fd/{self._fd}")
        except OSError:
            return None
