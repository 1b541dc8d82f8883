"""The folder for the records of launcher and ranks, and its removal after a SIGKILL.

A launcher removes its folder at its end, or else the keeper does. If both were killed, the next launch
removes it. Both hold the named pipe `alive` in it open for reading; if the pipe cannot be opened for writing
because nothing reads it, both are gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import PacelineError
from paceline.launching.rank.sockets import SOCKETS, SOCKETS_PREFIX

PREFIX = "paceline-launch-"
ALIVE = "alive"
# The path of a socket has at most 107 bytes; multiprocessing's names are the longest below this folder.
_LONGEST_TMP = 107 - len(f"/{SOCKETS_PREFIX}12345678/listener-12345678")
# A launcher that is just beginning has not opened its pipe yet.
_YOUNG_S = 10.0


@contextlib.contextmanager
def launch_folder() -> Iterator[Path]:
    """Make the folder of a launch, after clearing those of killed ones, and remove it at the end."""
    tmp = _choose_tmp()
    clear_abandoned(Path(tmp))
    # A rank whose keeper was killed may still write its record there.
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=tmp, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.mkfifo(folder / ALIVE)
        # multiprocessing's sockets are in another folder, because their paths must be short (see the link).
        sockets = Path(tempfile.mkdtemp(prefix=SOCKETS_PREFIX, dir=tmp))
        (folder / SOCKETS).symlink_to(sockets)
        # Open it for reading and writing: opening it for reading alone waits for a writer.
        fd = os.open(folder / ALIVE, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield folder
        finally:
            os.close(fd)
            shutil.rmtree(sockets, ignore_errors=True)


def _choose_tmp() -> str:
    """Return the folder for temporary files, or a shorter one if its sockets' paths would be too long."""
    named = tempfile.gettempdir()
    for folder in (named, "/tmp", "/var/tmp"):
        if len(os.fsencode(folder)) <= _LONGEST_TMP and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise PacelineError(
        "PL606",
        saw=f"TMPDIR={named} has {len(os.fsencode(named))} bytes, and neither /tmp nor /var/tmp can be "
        "written to.",
        rule=f"Sockets are made there, and the path of a socket is limited: at most {_LONGEST_TMP} bytes "
        "remain for the folder.",
        fix="Set TMPDIR to a folder with a shorter path.",
    )


def remove_folder(folder: Path) -> None:
    """Remove the folder of a launch that has ended, and the sockets that belong to it."""
    with contextlib.suppress(OSError):
        sockets = Path(os.readlink(folder / SOCKETS))
        if sockets.parent == folder.parent and sockets.name.startswith(SOCKETS_PREFIX):
            shutil.rmtree(sockets, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned(tmp: Path) -> None:
    """Remove the folders of launches in `tmp` whose processes are all gone."""
    for folder in tmp.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or somebody else is clearing it
            if _is_abandoned(folder):
                remove_folder(folder)


def _is_abandoned(folder: Path) -> bool:
    if time.time() - folder.stat().st_mtime < _YOUNG_S:
        return False
    try:
        os.close(os.open(folder / ALIVE, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in (errno.ENXIO, errno.ENOENT)
    return False
