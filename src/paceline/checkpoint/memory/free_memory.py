"""Reads how much memory this node has free."""

from __future__ import annotations

from pathlib import Path


def read_free_memory() -> int:
    """Return the bytes of memory that are free, by the kernel and by the limit of the container."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        free = 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 1 << 62
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, max(0, int(limit) - used)) if limit.isdigit() else free
