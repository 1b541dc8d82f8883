"""Finds whether the kernel killed a process because memory ran out, from the kernel's counts and log."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class OomCounts:
    """The numbers of processes killed for memory in this cgroup and on this machine; None: not counted."""

    in_group: int | None
    on_machine: int | None


def count_oom_kills() -> OomCounts:
    """Read the present counts."""
    machine = _find_number(Path("/proc/vmstat"), "oom_kill")
    for path in _event_files():
        number = _find_number(path, "oom_kill")
        if number is not None:
            return OomCounts(number, machine)
    return OomCounts(None, machine)


def explain_kill(pid: int, before: OomCounts) -> str:
    """Explain a SIGKILL from the kernel's log of that process, or from the counts since `before`."""
    line = _find_in_kernel_log(pid)
    if line is not None:
        group = "" if "Memory cgroup" not in line else " of its cgroup (container, job)"
        used = re.search(r"anon-rss:(\d+)kB", line)
        size = f" It held {int(used[1]) / 1e6:.2f} GB." if used else ""
        whose = group or " of this machine"
        return f"The kernel's out-of-memory killer ended it: the memory{whose} ran out.{size}"
    now = count_oom_kills()
    if before.in_group is not None and now.in_group is not None and now.in_group > before.in_group:
        return (
            "The kernel's out-of-memory killer ended it: the memory of its cgroup (container, job) ran out."
        )
    if before.on_machine is not None and now.on_machine is not None and now.on_machine > before.on_machine:
        return (
            "The kernel's out-of-memory killer most likely ended it: it killed a process on this machine "
            "at that time."
        )
    return ""


def describe_kill(pid: int, before: OomCounts) -> str:
    """Return one sentence on a SIGKILL, even if the kernel reports nothing."""
    known = explain_kill(pid, before)
    if known:
        return known
    if before.in_group is None and before.on_machine is None:
        return "The kernel may have ended it because memory ran out: see dmesg, and use a smaller microbatch."
    return "The kernel did not kill it for memory: a user or a scheduler sent the signal."


def _event_files() -> list[Path]:
    """Return the files with the counts of this process's cgroup: version 2's, then version 1's."""
    files = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.append(Path(f"/sys/fs/cgroup{path}/memory.events"))
            elif controllers == "memory":
                files.append(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
    return files


def _find_number(path: Path, name: str) -> int | None:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return None


def _find_in_kernel_log(pid: int) -> str | None:
    """Return the line of the kernel's log, if this user may read it."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found = None
    try:
        while True:
            try:
                record = os.read(fd, 8192).decode(errors="replace")
            except BrokenPipeError:  # overwritten while we read
                continue
            if re.search(rf"Killed process {pid}\b", record):
                found = record
    except OSError:  # no more records, or not allowed
        return found
    finally:
        os.close(fd)
