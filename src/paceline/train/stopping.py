"""Leaving on request: SIGTERM or Ctrl-C at any rank, and all ranks stop after the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A terminal and a launcher may both deliver one Ctrl-C; only a later one means "now".
_SAME_REQUEST_S = 1.0


class Stopped(SystemExit):
    """All ranks stopped after the same step, because one of them was asked to.

    A `SystemExit`, so that a script ends without a traceback, with the shell's code for the signal
    (130 for Ctrl-C, 143 for SIGTERM).

    Attributes:
        step: number of the last step taken.
        signal_name: what was asked with, for example `"SIGTERM"`.
        saved: folder of the checkpoint, or `None` where the trainer has no run folder.
    """

    def __init__(self, signum: int, step: int, saved: str | None) -> None:
        super().__init__(128 + signum)
        self.step = step
        self.signal_name = signal.Signals(signum).name
        self.saved = saved

    def __str__(self) -> str:
        where = f"saved {self.saved}" if self.saved else "nothing saved, there is no run folder"
        return f"stopped by {self.signal_name} after step {self.step}; {where}"


class StopRequests:
    """Notes signals instead of dying of them, while training.

    The first signal is only noted; the trainer passes it on to all ranks with the next step. A second
    one, at least a second later, ends this process at once.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._since_s = 0.0
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Takes over SIGINT and SIGTERM where nobody else has; only possible in the main thread."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        for signum in _SIGNALS:
            handler = signal.getsignal(signum)
            if handler in (signal.SIG_DFL, signal.default_int_handler) or _is_torchelastic(handler):
                self._previous[signum] = handler
                signal.signal(signum, self._note)

    def remove(self) -> None:
        """Gives the signals back."""
        for signum, handler in self._previous.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, handler)
        self._previous.clear()

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum and now - self._since_s > _SAME_REQUEST_S:
            self.remove()
            os.kill(os.getpid(), signum)
            return
        if not self.signum:
            self.signum, self._since_s = signum, now


def _is_torchelastic(handler: Callable[..., Any] | int | None) -> bool:
    return "torch.distributed.elastic" in getattr(handler, "__module__", "")
