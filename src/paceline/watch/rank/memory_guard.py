"""Polls this rank's memory, and leaves an account before the kernel ends the process: `MemoryGuard`.

The kernel's out-of-memory killer gives no warning: what filled the memory must be known before. The guard
reads the anonymous memory of the cgroup and the machine, every few milliseconds once it is nearly full. At
85% of the limit it takes an account, and newer ones as it rises further. The launcher shows the last one if a
SIGKILL follows.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.memory.account import Account
from paceline.memory.account_report import account_for, account_of_thread, write_account
from paceline.memory.limits import Gauge, Use
from paceline.memory.steps import STEPS

_FIRST = 0.85
# A rise by this part of the limit is worth a newer account, at this many times the seconds of the last one.
_RISE = 0.03
_PAUSES = 50
# No process fills its memory faster than this; so far from the limit nothing needs to be looked at.
_BYTES_PER_S = 6e9
_SHORTEST_S, _LONGEST_S = 0.004, 0.25


class MemoryGuard:
    """The guard of one rank.

    Args:
        rank: global.

    Attributes:
        next_s: when to look next, by `time.monotonic`.
    """

    def __init__(self, rank: int, path: Path) -> None:
        self.next_s = time.monotonic()
        self._rank = rank
        self._path = path
        self._gauge: Gauge | None = None
        self._level = 0.0
        self._taken_s = 0.0
        self._walk_s = 0.0
        self._forward: Account | None = None

    def install(self, torch: object) -> None:
        """Note the memory of steps from now on."""
        STEPS.install(torch)

    def remove(self) -> None:
        """Note no more steps."""
        STEPS.remove()

    def look(self) -> None:
        """Read the memory, and take an account if it is nearly full."""
        if self._gauge is None:
            self._gauge = Gauge()
        use = self._gauge.read_fullest()
        now_s = time.monotonic()
        is_new = use.share >= self._level + _RISE or now_s > self._taken_s + _PAUSES * max(1.0, self._walk_s)
        if use.share >= _FIRST and is_new:
            self._take(use)
            now_s = time.monotonic()
        elif use.share < _FIRST - _RISE:
            self._level = 0.0
        room = max(0.0, _FIRST * use.limit - use.used)
        self.next_s = now_s + min(_LONGEST_S, max(_SHORTEST_S, room / _BYTES_PER_S))

    def _take(self, use: Use) -> None:
        self._level, self._taken_s = use.share, time.monotonic()
        account = account_of_thread(threading.main_thread().ident or 0, self._rank, use)
        self._walk_s = time.monotonic() - self._taken_s
        if account is None:
            return
        if account.progress.phase == "forward":
            self._forward = account
        elif account.progress.phase == "backward" and self._forward is not None:
            # The saved tensors cannot be read now: backward began with those at the forward's end.
            account = replace(self._forward, used=account.used, time_s=account.time_s)
        write_account(self._path, account)

    def note_error(self, error: BaseException) -> None:
        """Leave an account for an error that reports that memory is exhausted."""
        with suppress(Exception):
            account = account_for(error, self._rank)
            if account is not None:
                write_account(self._path, replace(account, is_raised=True))
