"""Imported by the fork server as its first module: gives it a session of its own.

What a terminal or `timeout` sends to the launcher's process group would otherwise end the server, and
the launcher would lose sight of the ranks while they save. Anywhere else importing this does nothing.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def _is_fork_server() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "multiprocessing.forkserver" and frame.f_code.co_name == "main":
            return True
    return False


if _is_fork_server():
    with suppress(PermissionError):  # it leads a session already
        os.setsid()
