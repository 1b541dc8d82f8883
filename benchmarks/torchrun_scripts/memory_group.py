"""A memory cgroup (v1 or v2) that a command is started in."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


class NoMemoryGroupError(Exception):
    """Raised if no group can be made here, with the reason."""


def find_own_group() -> tuple[Path, str]:
    """Return the memory cgroup of this process, and the name of the file that holds a group's limit."""
    listed = Path("/proc/self/cgroup")
    if not listed.exists():
        raise NoMemoryGroupError("this system has no cgroups")
    for line in listed.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return MOUNT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        if number == "0" and "memory" in read_words(MOUNT / "cgroup.controllers"):
            return MOUNT / path.lstrip("/"), "memory.max"
    raise NoMemoryGroupError("no cgroup controller for memory is mounted")


def read_words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


def count_kills(group: Path) -> int:
    """Return how many processes of the group the kernel has killed for memory."""
    for name in ("memory.events", "memory.oom_control"):
        if (group / name).exists():
            found = re.search(r"^oom_kill (\d+)$", (group / name).read_text(), re.MULTILINE)
            return int(found[1]) if found else 0
    return 0


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a group with a limit, below this process's own; raise NoMemoryGroupError if that is impossible."""
    own, limit_file = find_own_group()
    group = own / f"torchrun_scripts-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise NoMemoryGroupError(f"no memory cgroup can be made: {error.strerror}") from None
    try:
        if not (group / limit_file).exists():
            raise NoMemoryGroupError("groups below this process's own have no memory controller")
        (group / limit_file).write_text(str(limit_bytes))
        # Without swap the limit is one; a system that doesn't count swap has no such file.
        swap = group / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")
        yield group
    except PermissionError as error:
        raise NoMemoryGroupError(f"the cgroup can't be written: {error.strerror}") from None
    finally:
        remove(group)


def enter(group: Path) -> list[str]:
    """Return words that, before a command, start it in the group."""
    return ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]


def remove(group: Path) -> None:
    # A group cannot be removed until the kernel has finished with its last process.
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)
