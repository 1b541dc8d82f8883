"""/dev/shm against what ranks and workers put there.

Workers of loaders hand batches over in /dev/shm, and NCCL connects the GPUs of a node through it. A
container has 64 MiB unless it was given more; what does not fit ends with "bus error" or "no space left on
device".
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from paceline.doctor.machine import Checked, Machine
from paceline.units import format_bytes

_LEAST_SIZE, _LEAST_FREE = 256 << 20, 128 << 20
_RULE = "Workers of loaders hand over batches there, and NCCL connects GPUs of a node through it."
_FIX = (
    "In a container, give it more: docker run --shm-size=8g, or an emptyDir of medium Memory. Elsewhere "
    "delete what ended jobs left there."
)


def check(machine: Machine) -> Checked:
    """Look at the size and the free part."""
    folder, checked = machine.root / "dev/shm", Checked("/dev/shm", "PL972", "missing")
    try:
        status = os.statvfs(folder)
    except OSError:
        checked.find("there is no /dev/shm.", _RULE, _FIX)
        return checked
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    checked.said = f"{format_bytes(free)} of {format_bytes(size)} free"
    if size < _LEAST_SIZE:
        checked.find(f"{format_bytes(size)} in all.", _RULE, _FIX)
    elif free < _LEAST_FREE:
        held = format_bytes(_count_held(folder))
        saw = f"{format_bytes(free)} of {format_bytes(size)} are free; files of yours hold {held}."
        checked.find(saw, _RULE, _FIX)
    return checked


def _count_held(folder: Path) -> int:
    """Return the bytes of this user's files there."""
    held = 0
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                held += status.st_blocks * 512 if status.st_uid == os.getuid() else 0
    return held
