"""Reads a user's file, and refuses anything but a regular file: a pipe would block, a device never ends."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes.

    Raises:
        OSError: if the file cannot be opened, or is not a regular file.
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind in _KINDS:
        raise OSError(errno.EINVAL, f"it is {_KINDS[kind]}", str(path))
    return path.open("rb")


def read_file(path: Path, most_bytes: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Args:
        most_bytes: a larger file is refused.

    Raises:
        OSError: if the file cannot be read, is larger, or is not a regular file.
    """
    with open_file(path) as stream:
        data = stream.read() if most_bytes is None else stream.read(most_bytes + 1)
    if most_bytes is not None and len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return data
