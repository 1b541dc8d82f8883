"""Warns if a save takes longer than ranks have for it after a stop signal.

The time of a save is measured. After a resume, it is the last one in the run's metrics, else that of the
first save. The time that ranks have comes from their launcher (`place.read_grace_s`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.place import read_grace_s
from paceline.train.belongings import METRICS
from paceline.units import format_seconds

log = logging.getLogger(__name__)

# Rows of several thousand steps.
_TAIL_BYTES = 4 << 20


class Grace:
    """The time between a stop signal and the end of the ranks, compared with the time of a save.

    Args:
        is_main: whether this rank reports it.
    """

    def __init__(self, *, is_main: bool) -> None:
        self._grace_s = read_grace_s(os.environ) if is_main else None

    def read(self, folder: Path) -> None:
        """Check the last save in a run's metrics."""
        if self._grace_s is not None:
            self.check(next(_list_save_times(folder / METRICS), None), "The last save of this run")

    def check(self, save_s: float | None, which: str = "A save") -> None:
        """Warn, once, if a save took longer than the grace."""
        if self._grace_s is None or save_s is None or save_s <= self._grace_s:
            return
        log.warning(
            "%s took %s, and after a stop signal ranks are killed within %s: the steps since the last "
            "checkpoint would be lost. Give ranks more time (--grace-s and the scheduler's own limit, or "
            '--shutdown-timeout), or save faster: checkpoint.mode = "sharded", or a faster disk. [PL557]',
            *(which, format_seconds(save_s), format_seconds(self._grace_s)),
        )
        self._grace_s = None


def _list_save_times(path: Path) -> Iterator[float]:
    """Yield the times of saves in a file of metrics, the last one first."""
    lines: list[bytes] = []
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(save_s := row.get("save_s"), int | float):
                yield float(save_s)
