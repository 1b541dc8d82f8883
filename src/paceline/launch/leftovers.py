"""The folder in which launcher and ranks leave word, and what is left of it after a SIGKILL.

A launcher removes its folder at its end. One that was killed can't, so each launch first removes those
to which nobody belongs any more. Every launcher and every rank reads the named pipe `alive` in it: where
a pipe can't be opened for writing because nobody reads, all of them are gone.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

PREFIX = "paceline-launch-"
ALIVE = "alive"
# Holds the path of the folder where multiprocessing keeps sockets: its fork server's, and those of ranks
# and loader workers, which take the folder over from the launcher if that has it before it makes them.
SOCKETS = "sockets"
# A launcher that is just beginning has not opened its pipe yet.
_YOUNG_S = 10.0


@contextlib.contextmanager
def launch_folder() -> Iterator[Path]:
    """Makes the folder of a launch, after clearing those of killed ones, and removes it at the end."""
    clear_abandoned(Path(tempfile.gettempdir()))
    # A rank whose fork server was killed may still leave word there.
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # A child of multiprocessing shares its parent's folder, which is not ours to remove.
        if multiprocessing.parent_process() is None:
            (folder / SOCKETS).write_text(util.get_temp_dir(), encoding="utf-8")
        yield folder


def clear_abandoned(tmp: Path) -> None:
    """Removes the folders of launches in `tmp` whose processes are all gone."""
    for folder in tmp.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or somebody else is clearing it
            if not _is_abandoned(folder):
                continue
            with contextlib.suppress(FileNotFoundError):
                sockets = Path((folder / SOCKETS).read_text(encoding="utf-8"))
                if sockets.parent == folder.parent and sockets.name.startswith("pymp-"):
                    shutil.rmtree(sockets, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    if time.time() - folder.stat().st_mtime < _YOUNG_S:
        return False
    try:
        os.close(os.open(folder / ALIVE, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in (errno.ENXIO, errno.ENOENT)
    return False
