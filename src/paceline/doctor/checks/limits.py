"""Limits of open files, processes and locked memory (ulimit).

Ranks, workers and connections are files: with 1,024 of them, some hundred peers fit. InfiniBand needs to
lock memory; a limit there makes NCCL fail while it registers buffers.
"""

from __future__ import annotations

import resource

from paceline.doctor.checks.infiniband import list_devices
from paceline.doctor.machine import Checked, Machine, select
from paceline.finding import Finding

NAME = "limits"
_LEAST_FILES, _LEAST_PROCESSES = 1024, 1024
_ANY = resource.RLIM_INFINITY


def check(machine: Machine) -> Checked:
    """Compare the soft limits with what a job needs."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, locked = (
        resource.getrlimit(resource.RLIMIT_NPROC)[0],
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    )
    findings = [
        _too_low("n", "open files", files, "Ranks, workers, logs and connections are open files.", most_files)
        if files != _ANY and files < _LEAST_FILES
        else None,
        _too_low("u", "processes", processes, "Each thread counts as one.", _ANY)
        if processes != _ANY and processes < _LEAST_PROCESSES
        else None,
        _too_low(
            "l", "bytes of locked memory", locked, "NCCL locks the memory that InfiniBand sends from.", _ANY
        )
        if locked != _ANY and list_devices(machine)
        else None,
    ]
    said = f"{_format(files)} files, {_format(processes)} processes"
    return Checked(NAME, said, select(findings))


def _format(limit: int) -> str:
    return "any number of" if limit == _ANY else str(limit)


def _too_low(flag: str, what: str, limit: int, rule: str, most: int) -> Finding:
    wanted = {"n": "65536", "u": "65536"}.get(flag, "unlimited")
    if most != _ANY and wanted.isdigit():
        wanted = str(min(int(wanted), most))
    return Finding(
        "PL973",
        NAME,
        saw=f"at most {limit} {what}.",
        rule=rule,
        fix=f"Raise the limit where the job starts: ulimit -{flag} {wanted}; for good in "
        "/etc/security/limits.conf or "
        "the scheduler's unit file.",
    )
