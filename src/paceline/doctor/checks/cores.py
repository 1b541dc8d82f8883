"""Cores against ranks and threads.

Reads the cores that the process may use, the quota of its cgroup, OMP_NUM_THREADS. A rank without a core of
its own waits for others in every collective. A quota below the number of cores is worse: torch starts a
thread for each core that it sees, and the kernel stops all of them for the rest of each period. A job that
runs already is no fault, but it shares what is measured, so it is named.
"""

from __future__ import annotations

import re

from paceline.doctor.machine import Checked, Machine, read_number
from paceline.place import usable_cores

_JOB = re.compile(
    r"(\S*python\S* (-\S+ )*)?(\S*/)?"
    r"(?P<job>torchrun|torch\.distributed\.run|paceline (run|train)|accelerate launch|deepspeed|mpirun)\b"
    r"(?!.* doctor\b)"
)


def check(machine: Machine) -> Checked:
    """Compare cores, quota, ranks and threads."""
    cores, quota = usable_cores(), _read_quota(machine)
    usable = min(cores, quota or cores)
    ranks = machine.num_ranks or 1
    threads = machine.environ.get("OMP_NUM_THREADS", "")
    asked = ranks * (int(threads) if threads.isdigit() else 1)
    said = f"{cores} usable" + (f", quota {quota:g}" if quota is not None else "")
    checked = Checked("cores", "PL970", said, note=_find_job(machine))
    if quota is not None and quota < 0.9 * cores and not threads:
        checked.find(
            f"the cgroup's quota is {quota:g} cores, and {cores} are visible.",
            "Libraries start a thread per visible core, and the kernel then stops all of them for a part of "
            "each period.",
            f"Raise the quota to {cores}, restrict the process to as many cores as the quota has "
            f"(taskset, cpuset), or set OMP_NUM_THREADS={max(1, int(quota // ranks))}.",
        )
    if asked > usable:
        checked.find(
            f"{ranks} ranks with {asked // ranks} threads each, and {usable:g} cores.",
            "Ranks that share a core wait for each other in every collective.",
            f"Start {max(1, int(usable))} ranks or fewer here"
            + (", or set OMP_NUM_THREADS=1." if asked > ranks else "."),
        )
    return checked


def _find_job(machine: Machine) -> str:
    """Return a sentence on a job that runs here, by the command of its launcher; "" without one."""
    for number in filter(str.isdigit, machine.list("proc")):
        command = (machine.read(f"proc/{number}/cmdline") or "").replace("\0", " ")
        if found := _JOB.match(command):
            words = command[found.start("job") :][:60].strip()
            return f"a job runs here (process {number}: {words}) and shares what is measured"
    return ""


def _read_quota(machine: Machine) -> float | None:
    """Return the cores that the cgroup grants, of version 2 or 1; `None` without a limit."""
    words = (machine.read("sys/fs/cgroup/cpu.max") or "").split()
    if len(words) == 2 and words[0].isdigit():
        return int(words[0]) / int(words[1])
    quota = read_number(machine, "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = read_number(machine, "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None
