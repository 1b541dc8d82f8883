"""Places the sockets of a rank's multiprocessing in a folder that is removed with the job."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from paceline.launching.rank.import_hook import when_imported

SOCKETS = "sockets"
"""The link in a launch's folder to the folder of the sockets."""
SOCKETS_PREFIX = "pymp-pl-"


def keep_sockets_in(launch_folder: str) -> None:
    """Make a rank's multiprocessing put its sockets where they are removed with the job."""

    def place(multiprocessing: Any) -> None:
        with contextlib.suppress(OSError):
            sockets = os.readlink(os.path.join(launch_folder, SOCKETS))
            multiprocessing.current_process()._config["tempdir"] = sockets

    # Only when the script imports it, because the module records what `__main__` is at that time.
    when_imported("multiprocessing", place)
