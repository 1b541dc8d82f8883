"""The owner of a run's folder, as recorded in its lock file.

The kernel knows whether a folder is locked. The lock file names the process that holds the lock, so that the
next start can distinguish a running run from ranks whose launcher was killed. Those save and leave within
seconds.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

# Start times are computed from the boot time, which changes when the clock is set.
_SAME_START_S = 2.0


@dataclass(frozen=True)
class Owner:
    """The process that holds the lock, and the one that started it.

    Attributes:
        host: name of their machine.
        pid: of rank 0.
        launcher_pid: of the process that started the ranks: `paceline train`, torchrun, the daemon of srun or
            mpirun.
        launcher_start_s: when the launcher started, in seconds since 1970, because process ids are reused;
            `None` if it had ended before rank 0 claimed the folder.
    """

    host: str
    pid: int
    launcher_pid: int
    launcher_start_s: float | None

    def has_lost_launcher(self) -> bool:
        """Return whether the launcher has certainly ended; always false for one on another machine."""
        if self.host != socket.gethostname():
            return False
        start_s = _start_s(self.launcher_pid)
        if start_s is None or self.launcher_start_s is None:
            return True
        return abs(start_s - self.launcher_start_s) > _SAME_START_S

    def dump(self) -> str:
        """Return the text of the lock file."""
        return json.dumps(asdict(self)) + "\n"


def describe_owner(launcher_pid: int | None) -> Owner:
    """Describe this process as an owner.

    Args:
        launcher_pid: of the process that started the ranks; by default the parent of this one.
    """
    launcher_pid = os.getppid() if launcher_pid is None else launcher_pid
    return Owner(socket.gethostname(), os.getpid(), launcher_pid, _start_s(launcher_pid))


def read_owner(path: Path) -> Owner | None:
    """Return the owner that a lock file names, or `None` if it names none, as while it is being written."""
    try:
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _start_s(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        # A zombie no longer runs; only its parent has not reaped it yet.
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return 0.0  # another user's process: it exists
