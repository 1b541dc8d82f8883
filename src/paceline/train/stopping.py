"""Stops all ranks after the same step when any of them receives Ctrl-C, SIGTERM or a scheduler's signal."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from paceline.exit_codes import stop_code

# Schedulers announce the end of a job by SIGTERM, or by the signal that a job script names.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# A terminal and a launcher may both deliver one Ctrl-C; only a later one means "now".
_SAME_REQUEST_S = 1.0
# How often work between steps asks whether to stop; launchers give ranks several seconds to end.
_CHECK_S = 1.0
# A loop may ask after each step, and need not wait for other ranks then.
_USUAL_CALLS = 3


class Stopped(SystemExit):
    """The exit of a rank after a stop signal; all ranks raise it after the same step.

    A `SystemExit`, so that a script ends without a traceback: with 130 for Ctrl-C, and with 75 for any other
    signal, by which a scheduler knows that the same command continues (`exit_codes.py`).

    Attributes:
        step: number of the last step taken.
        signal_name: name of the signal, for example `"SIGTERM"`.
        saved: folder of the checkpoint, or `None` if the trainer has no run folder.
    """

    def __init__(self, signum: int, step: int, saved: str | None) -> None:
        super().__init__(stop_code(signum))
        self.step = step
        self.signal_name = signal.Signals(signum).name
        self.saved = saved

    def __str__(self) -> str:
        where = f"saved {self.saved}" if self.saved else "nothing saved, there is no run folder"
        return f"stopped by {self.signal_name} after step {self.step}; {where}"


class StopRequests:
    """The stop signals that this process received while training.

    The first signal is only recorded; the trainer reports it to all ranks with the next step. A second
    one, at least 1 s later, ends this process at once.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._since_s = 0.0
        self._previous: dict[int, Any] = {}
        self._rest: tuple[int, StopChecks] | None = None

    def install(self) -> None:
        """Handle the signals unless the user's code does; only possible in the main thread."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        for signum in _SIGNALS:
            handler = signal.getsignal(signum)
            is_free = handler in (signal.SIG_DFL, signal.default_int_handler) and not _is_caught_in_c(signum)
            if is_free or "torch.distributed.elastic" in getattr(handler, "__module__", ""):
                self._previous[signum] = handler
                signal.signal(signum, self._note)

    def check_rest(self, step: int, device: torch.device, mesh: object) -> int:
        """Return the signal that some rank has received, in long work after a step (`StopChecks`); else 0."""
        if self._rest is None or self._rest[0] != step:
            self._rest = step, StopChecks(self, device, is_alone=mesh is None, first=_USUAL_CALLS)
        try:
            self._rest[1].check()
        except AskedToStopError as asked:
            return asked.signum
        return 0

    def remove(self) -> None:
        """Restore the previous signal handlers."""
        for signum, handler in self._previous.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, handler)
        self._previous.clear()
        self.signum = 0

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum and now - self._since_s > _SAME_REQUEST_S:
            self.remove()
            os.kill(os.getpid(), signum)
            return
        if not self.signum:
            self.signum, self._since_s = signum, now


# Of this process, since a signal is for all of its trainers: the one that trains next saves and leaves.
REQUESTS = StopRequests()


class AskedToStopError(Exception):
    """The end of work between two steps, on all ranks at the same place; the trainer then leaves.

    Attributes:
        signum: the signal that some rank received.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopChecks:
    """Checks for stop signals in long work between steps, which all ranks do in as many pieces.

    A check is a collective. The first comes after the first pieces; its result, the same on all ranks, holds
    how many pieces the slowest rank does in a second, and so which piece the next one comes after.

    Args:
        is_alone: whether there are no other ranks.
        first: after which piece the first check comes.
    """

    def __init__(
        self, requests: StopRequests, device: torch.device, *, is_alone: bool, first: int = 1
    ) -> None:
        requests.install()
        self._requests, self._device, self._is_alone = requests, device, is_alone
        self._begin_s = time.monotonic()
        self._num_pieces, self._next = -1, first

    def check(self) -> None:
        """Raise `AskedToStopError` if some rank was asked to stop; called before each piece; collective."""
        self._num_pieces += 1
        signum, elapsed_s = self._requests.signum, time.monotonic() - self._begin_s
        if not self._is_alone:
            if self._num_pieces < self._next:
                return
            numbers = torch.tensor([signum, elapsed_s], dtype=torch.float64, device=self._device)
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
            signum, elapsed_s = int(numbers[0]), float(numbers[1])
            self._next += max(1, int(_CHECK_S * self._num_pieces / max(elapsed_s, 1e-6)))
        if signum:
            raise AskedToStopError(signum)


def _is_caught_in_c(signum: int) -> bool:
    """Return whether code outside of Python handles SIGUSR1 or SIGUSR2, as `faulthandler.register` does."""
    if signum not in (signal.SIGUSR1, signal.SIGUSR2):
        return False  # Python's own handler of SIGINT counts as caught.
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as file:
        masks = dict(line.split(":", 1) for line in file)
        return bool(int(masks["SigCgt"], 16) >> (signum - 1) & 1)
    return False
