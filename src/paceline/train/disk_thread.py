"""A thread for small writes to a disk that may stand still, so that training does not."""

from __future__ import annotations

import threading
from collections.abc import Callable

WAIT_S = 5.0
"""How long training waits for the disk to take a few lines."""


class DiskThread:
    """A thread for one task at a time on a disk that may stand still."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def wait(self, timeout_s: float) -> bool:
        """Return whether the last task has ended, in time; raise its error."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error
        return True

    def begin(self, task: Callable[[], object]) -> None:
        """Run a task; the last one has ended."""

        def run() -> None:
            try:
                task()
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="paceline-disk", daemon=True)
        self._thread.start()
