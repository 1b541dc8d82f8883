"""Warns if a save takes longer than ranks have for it after a stop signal.

The time that ranks have comes from their launcher (`place.read_grace_s`).
"""

from __future__ import annotations

import logging
import os

from paceline.place import read_grace_s
from paceline.units import format_seconds

log = logging.getLogger(__name__)


class Grace:
    """The time between a stop signal and the end of the ranks, compared with the time of a save.

    Args:
        is_main: whether this rank reports it.
    """

    def __init__(self, *, is_main: bool) -> None:
        self._grace_s = read_grace_s(os.environ) if is_main else None

    def check(self, save_s: float | None) -> None:
        """Warn, once, if a save took longer than the grace."""
        if self._grace_s is None or save_s is None or save_s <= self._grace_s:
            return
        log.warning(
            "A save took %s, and after a stop signal ranks are killed within %s: the steps since the last "
            "checkpoint would be lost. Give ranks more time (--grace-s and the scheduler's own limit, or "
            '--shutdown-timeout), or save faster: checkpoint.mode = "sharded", or a faster disk. [PL557]',
            format_seconds(save_s),
            format_seconds(self._grace_s),
        )
        self._grace_s = None
