"""Finds whether the kernel killed a process because memory ran out, from the kernel's counts."""

from __future__ import annotations

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


def explain_kill(before: OomCounts) -> str:
    """Explain a SIGKILL from the counts since `before`; empty if they have not grown."""
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


def describe_kill(before: OomCounts) -> str:
    """Return one sentence on a SIGKILL, even if the kernel reports nothing."""
    known = explain_kill(before)
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
