"""Memory and what limits it.

Reads /proc/meminfo, the cgroup's limit and vm.overcommit_memory. A process whose cgroup is full is killed
without a word; strict overcommit makes forks fail, and with them the workers of loaders.
"""

from __future__ import annotations

from paceline.doctor.machine import Checked, Machine, read_number, read_table
from paceline.units import format_bytes

_LEAST_PER_RANK = 1 << 30
_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


def check(machine: Machine) -> Checked:
    """Compare what is free with what ranks need at least."""
    table = read_table(machine, "proc/meminfo")
    total, free = table.get("MemTotal", 0), table.get("MemAvailable", 0)
    limits = [limit for path in _LIMITS if (limit := read_number(machine, path)) is not None]
    limit = min((limit for limit in limits if 0 < limit < total), default=None)
    ranks = machine.num_ranks or 1
    usable = min(free, limit or free)
    checked = Checked("memory", "PL971")
    if total and usable < ranks * _LEAST_PER_RANK:
        checked.find(
            f"{format_bytes(usable)} for {ranks} rank{'s' if ranks > 1 else ''}"
            + (f" (the cgroup's limit is {format_bytes(limit)})." if limit is not None else "."),
            "torch alone takes some hundred MiB per rank, and the kernel kills a rank that finds no memory.",
            "Start fewer ranks here, raise the limit, or end other processes.",
        )
    if read_number(machine, "proc/sys/vm/overcommit_memory") == 2:
        checked.find(
            "vm.overcommit_memory is 2.",
            "The kernel then refuses forks of processes that have reserved much memory, such as ranks with "
            "workers.",
            "Set it to 0: sysctl vm.overcommit_memory=0.",
        )
    said = f"{format_bytes(total)}, {format_bytes(free)} free" if total else "not known"
    said += f", limit {format_bytes(limit)}" if limit is not None else ""
    swapped = table.get("SwapTotal", 0) - table.get("SwapFree", 0)
    checked.said = said + (f", {format_bytes(swapped)} in swap" if swapped > total // 20 else "")
    return checked
