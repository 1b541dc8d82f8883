"""Reads how much memory this process and its cgroup use, and the limits that apply to them.

Anonymous memory counts, because the kernel can drop pages of files but not these: a process is killed once
anonymous and shared memory fill its cgroup (version 1 or 2) or its machine.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LimitKind = Literal["cgroup", "machine", "device"]
_PAGE = resource.getpagesize()
_MOUNT = Path("/sys/fs/cgroup")
# Version 1 writes the largest number that it knows for "no limit".
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Use:
    """The memory of a limit that is taken.

    Attributes:
        kind: whose limit it is.
        limit: in bytes.
        used: bytes that count against it and that nothing can free.
    """

    kind: LimitKind
    limit: int
    used: int

    @property
    def share(self) -> float:
        """The used part of the limit."""
        return self.used / self.limit if self.limit else 0.0


def read_anonymous(pid: int | str = "self") -> int | None:
    """Return the bytes of a process that no file has, shared memory included; `None` if it has ended."""
    found = None
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key in ("RssAnon", "RssShmem"):
                found = (found or 0) + int(value.split()[0]) * 1024
    return found


def read_resident() -> int:
    """Return the resident bytes of this process; takes some microseconds."""
    with suppress(OSError, ValueError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def read_machine() -> Use:
    """Return the use of this machine's memory."""
    # Not by psutil: ranks read it from the start on, and a script may have another version of psutil.
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    values = {key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines)}
    return Use("machine", values["MemTotal"], values["MemTotal"] - values["MemAvailable"])


class Gauge:
    """The cgroup's limits of this process, looked up once, to be read often."""

    def __init__(self) -> None:
        self._groups = list(_list_groups())

    def read_group(self) -> Use | None:
        """Return the use of the cgroup that is fullest, of this process's own and those around it."""
        uses = [use for group in self._groups if (use := group.read()) is not None]
        return max(uses, key=lambda use: use.share, default=None)

    def read_fullest(self) -> Use:
        """Return the fullest of the cgroup and the machine."""
        group, machine = self.read_group(), read_machine()
        return machine if group is None or group.share < machine.share else group


@dataclass(frozen=True)
class _Group:
    """A cgroup's folder, with the names of its version's files and numbers."""

    folder: Path
    limit: str
    used: tuple[str, ...]

    def read(self) -> Use | None:
        with suppress(OSError, ValueError):
            text = (self.folder / self.limit).read_text().strip()
            if text == "max" or int(text) >= _UNLIMITED:
                return None
            used = 0
            for line in (self.folder / "memory.stat").read_text().splitlines():
                key, _, value = line.partition(" ")
                if key in self.used:
                    used += int(value)
            return Use("cgroup", int(text), used)
        return None


def _list_groups() -> list[_Group]:
    """Return this process's groups with a memory controller, the innermost first."""
    found: list[_Group] = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                found += _climb(
                    _MOUNT / "memory", path, "memory.limit_in_bytes", ("total_rss", "total_shmem")
                )
            elif not controllers:
                found += _climb(_MOUNT, path, "memory.max", ("anon", "shmem"))
    return found


def _climb(mount: Path, path: str, limit: str, used: tuple[str, ...]) -> list[_Group]:
    # In a container the path may be that of the host, and the mount the container's own group.
    folder = mount / path.lstrip("/")
    if not folder.is_dir():
        folder = mount
    found = []
    while True:
        if (folder / limit).exists():
            found.append(_Group(folder, limit, used))
        if folder == mount or mount not in folder.parents:
            return found
        folder = folder.parent


def count_private(pid: int) -> int:
    """Return the anonymous bytes of a process, a page that several forks share divided among them."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if key == "Pss_Anon":
                return int(value.split()[0]) * 1024
    return read_anonymous(pid) or 0


def list_children(pid: int) -> list[int]:
    """Return the processes that a process has started and that still run."""
    found: list[int] = []
    with suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found
