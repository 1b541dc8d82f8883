"""Limits of open files, processes and locked memory (ulimit).

Ranks, workers and connections are files: with 1,024 of them, some hundred peers fit. InfiniBand needs to
lock memory; a limit there makes NCCL fail while it registers buffers.
"""

from __future__ import annotations

import resource

from paceline.doctor.checks.infiniband import list_devices
from paceline.doctor.machine import Checked, Machine

_LEAST_FILES, _LEAST_PROCESSES = 1024, 1024
_ANY = resource.RLIM_INFINITY


def check(machine: Machine) -> Checked:
    """Compare the soft limits with what a job needs."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, locked = (
        resource.getrlimit(resource.RLIMIT_NPROC)[0],
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    )
    said = f"{_format(files)} files, {_format(processes)} processes"
    checked = Checked("limits", "PL973", said)
    if files != _ANY and files < _LEAST_FILES:
        wanted = 65536 if most_files == _ANY else min(65536, most_files)
        rule = "Ranks, workers, logs and connections are open files."
        checked.find(f"at most {files} open files.", rule, _advise("n", wanted))
    if processes != _ANY and processes < _LEAST_PROCESSES:
        checked.find(f"at most {processes} processes.", "Each thread counts as one.", _advise("u", 65536))
    if locked != _ANY and list_devices(machine):
        rule = "NCCL locks the memory that InfiniBand sends from."
        checked.find(f"at most {locked} bytes of locked memory.", rule, _advise("l", "unlimited"))
    return checked


def _format(limit: int) -> str:
    return "any number of" if limit == _ANY else str(limit)


def _advise(flag: str, wanted: int | str) -> str:
    return (
        f"Raise the limit where the job starts: ulimit -{flag} {wanted}; for good in "
        "/etc/security/limits.conf or the scheduler's unit file."
    )
