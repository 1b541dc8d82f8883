"""The folder for the records of launcher and ranks.

A launcher removes its folder at its end, or else the keeper does. If both were killed, a few kB stay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import PacelineError
from paceline.launching.rank.sockets import SOCKETS, SOCKETS_PREFIX

PREFIX = "paceline-launch-"
# The path of a socket has at most 107 bytes; multiprocessing's names are the longest below this folder.
_LONGEST_TMP = 107 - len(f"/{SOCKETS_PREFIX}12345678/listener-12345678")


@contextlib.contextmanager
def launch_folder() -> Iterator[Path]:
    """Make the folder of a launch, and remove it at the end."""
    tmp = _choose_tmp()
    # A rank whose keeper was killed may still write its record there.
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=tmp, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # multiprocessing's sockets are in another folder, because their paths must be short (see the link).
        sockets = Path(tempfile.mkdtemp(prefix=SOCKETS_PREFIX, dir=tmp))
        (folder / SOCKETS).symlink_to(sockets)
        try:
            yield folder
        finally:
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
