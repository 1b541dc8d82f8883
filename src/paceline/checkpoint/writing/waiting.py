"""Waits for the writers of an earlier start, which finish a save although their ranks have ended."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from paceline.checkpoint.alive import find_live
from paceline.errors import PacelineError

log = logging.getLogger(__name__)

_LIMIT_S = 600.0
_TOLD_AFTER_S = 5.0
_POLL_S = 0.05


def await_writers(folder: Path, limit_s: float = _LIMIT_S) -> None:
    """Wait until no writer is working in a `checkpoints` folder, so that its newest checkpoint is known.

    Raises:
        PacelineError: PL547 if one still works after `limit_s`.
    """
    begin_s = time.monotonic()
    has_told = False
    while live := next(find_live(folder), None):
        waited_s = time.monotonic() - begin_s
        if waited_s > limit_s:
            raise PacelineError(
                "PL547",
                saw=f"A writer of an earlier start has been working in {live.folder} for {waited_s:.0f} s.",
                rule="A run continues from its newest checkpoint, and that writer may be about to commit it.",
                fix="Check whether the disk hangs. To continue from the checkpoint before, kill that process "
                "(paceline.checkpoint.writing.writer).",
            )
        if waited_s > _TOLD_AFTER_S and not has_told:
            log.warning("waiting for a writer of an earlier start, which still saves into %s", live.folder)
            has_told = True
        time.sleep(_POLL_S)
