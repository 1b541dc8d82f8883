"""/dev/shm against what ranks and workers put there.

Workers of loaders hand batches over in /dev/shm, and NCCL connects the GPUs of a node through it. A
container has 64 MiB unless it was given more; what does not fit ends with "bus error" or "no space left on
device".
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from paceline.doctor.machine import Checked, Machine, select
from paceline.finding import Finding
from paceline.units import format_bytes

NAME = "/dev/shm"
_LEAST_SIZE, _LEAST_FREE = 256 << 20, 128 << 20


def check(machine: Machine) -> Checked:
    """Look at the size and the free part."""
    folder = machine.root / "dev/shm"
    try:
        status = os.statvfs(folder)
    except OSError:
        return Checked(NAME, "missing", (_too_small("there is no /dev/shm."),))
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    held = _count_held(folder)
    findings = [
        _too_small(f"{format_bytes(size)} in all.") if size < _LEAST_SIZE else None,
        _too_small(
            f"{format_bytes(free)} of {format_bytes(size)} are free; files of yours hold "
            f"{format_bytes(held)}."
        )
        if size >= _LEAST_SIZE and free < _LEAST_FREE
        else None,
    ]
    return Checked(NAME, f"{format_bytes(free)} of {format_bytes(size)} free", select(findings))


def _too_small(saw: str) -> Finding:
    return Finding(
        "PL972",
        NAME,
        saw=saw,
        rule="Workers of loaders hand over batches there, and NCCL connects GPUs of a node through it.",
        fix="In a container, give it more: docker run --shm-size=8g, or an emptyDir of medium Memory. "
        "Elsewhere "
        "delete what ended jobs left there.",
    )


def _count_held(folder: Path) -> int:
    """Return the bytes of this user's files there."""
    held = 0
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                held += status.st_blocks * 512 if status.st_uid == os.getuid() else 0
    return held
