"""The disk of the run folder: whether it can be written to, has room and is fast enough.

Checkpoints are written beside each other, synchronised and renamed. A full or read-only disk ends a run at
its first save; a disk that needs a second to synchronise makes each save slow.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from paceline.doctor.machine import Checked, Machine
from paceline.units import format_bytes, format_seconds

_LEAST_FREE, _LEAST_FILES, _SLOW_S = 2 << 30, 1000, 0.5
_TRIES, _SIZE = 3, 1 << 20


def check(machine: Machine) -> Checked:
    """Write, synchronise and rename a file in the run folder, or in its nearest parent that exists."""
    folder = machine.folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    kind = find_type(machine, folder)
    checked = Checked("disk", "PL974", f"{folder} ({kind}) cannot be written to")
    try:
        seconds = _measure_sync(folder)
    except OSError as error:
        checked.find(
            f"a file in {folder} could not be written: {error.strerror}.",
            "Checkpoints, metrics and logs are written there.",
            "Name a folder that you may write to, or mount the disk for writing.",
        )
        return checked
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    checked.said = f"{folder} ({kind}), {format_bytes(free)} free, a MiB on disk in {format_seconds(seconds)}"
    if free < _LEAST_FREE:
        checked.find(
            f"{format_bytes(free)} are free in {folder}.",
            "A checkpoint takes three times the parameters' bytes and more, and two exist while one is "
            "written.",
            "Make room, or name another folder.",
        )
    if status.f_files and status.f_favail < _LEAST_FILES:
        checked.find(
            f"{status.f_favail} files can still be made in {folder}.",
            "A run makes some hundred.",
            "Delete small files there, or name another folder.",
        )
    if seconds > _SLOW_S:
        checked.find(
            f"a MiB needs {format_seconds(seconds)} until it is on the disk of {folder}.",
            "Each save waits for its files.",
            "Name a folder on a faster disk, or save asynchronously.",
        )
    return checked


def find_type(machine: Machine, folder: Path) -> str:
    """Return the type of a folder's file system, such as ext4 or nfs4."""
    best, kind = -1, "unknown"
    for line in (machine.read("proc/mounts") or "").splitlines():
        words = line.split()
        if (
            len(words) > 2
            and (folder == Path(words[1]) or Path(words[1]) in folder.parents)
            and len(words[1]) > best
        ):
            best, kind = len(words[1]), words[2]
    return kind


def _measure_sync(folder: Path) -> float:
    """Return the seconds in which a new file of a MiB is on disk and renamed, the median of some."""
    seconds = []
    for _ in range(_TRIES):
        started_s = time.perf_counter()
        descriptor, path = tempfile.mkstemp(prefix=".paceline-doctor-", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(bytes(_SIZE))
                file.flush()
                os.fsync(file.fileno())
            os.replace(path, f"{path}.moved")
        finally:
            for name in (path, f"{path}.moved"):
                with suppress(OSError):
                    os.remove(name)
        seconds.append(time.perf_counter() - started_s)
    return median(seconds)
