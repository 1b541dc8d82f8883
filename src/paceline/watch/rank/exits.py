"""Detects what ends a process just before it does: an uncaught exception, `os._exit`, `std::terminate`.

If gloo receives data of another size, it throws an exception in its own thread, which nobody catches. C++
then calls its terminate handler in that thread, outside of any signal handler, so that Python may run there.
The previously set handler is called afterwards, writes the exception's text and aborts. Our handler has to
wait for Python's lock, so a thread that holds it in compiled code delays the end for as long. Nothing here
costs anything until a process ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from paceline.launching.ending.endings import Ending, as_status
from paceline.own_code import is_own
from paceline.watch.protocol.report import Frame
from paceline.watch.rank.threads import mark_main_thread, mark_stack, resolve

ReportEnd = Callable[[Ending, tuple[Frame, ...]], None]
"""Takes what ends the process, and where its main thread is or where the exception was raised."""

_LIBRARY = "libstdc++.so.6"
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"  # std::set_terminate(void (*)())
# Never freed: C++ has their addresses, and a thread may be in one while it is replaced.
_callbacks: list[Any] = []


class Exits:
    """The ways out of a process that bypass Python's exit handlers.

    Args:
        report: called before the process ends, in whichever thread ends it.
    """

    def __init__(self, rank: int, report: ReportEnd) -> None:
        self._rank = rank
        self._report = report
        self._exits: tuple[Any, Any] | None = None
        self._set_terminate: Any = None
        self._terminate: int | None = None
        self._callback = ctypes.CFUNCTYPE(None)(self._on_terminate)
        _callbacks.append(self._callback)

    def watch_exit(self) -> None:
        """Report every later call of `os._exit` that the user's code leads to."""
        original = os._exit

        def _exit(status: int) -> NoReturn:
            with suppress(Exception):
                frames = resolve(mark_stack(sys._getframe(1)))
                if any(is_own(frame.file) for frame in frames):
                    ending = Ending(
                        *(self._rank, "exit", as_status(status), time.time()),
                        words=f"called os._exit({status})",
                    )
                    self._report(ending, frames)
            original(status)

        self._exits = original, _exit
        os._exit = _exit

    def watch_terminate(self) -> None:
        """Report every later `std::terminate`, if torch uses GCC's library."""
        try:
            set_terminate = getattr(ctypes.CDLL(_LIBRARY), _SET_TERMINATE)
        except (OSError, AttributeError):
            return
        set_terminate.restype = ctypes.c_void_p
        set_terminate.argtypes = [ctypes.c_void_p]
        self._terminate = set_terminate(ctypes.cast(self._callback, ctypes.c_void_p))
        self._set_terminate = set_terminate

    def forget(self) -> None:
        """Restore the previous handlers; to be called while Python still runs, and in forks."""
        if self._exits is not None and os._exit is self._exits[1]:
            os._exit = self._exits[0]
        if self._set_terminate is not None:
            self._set_terminate(self._terminate)
            self._set_terminate = None

    def _on_terminate(self) -> None:
        with suppress(Exception):
            ending = Ending(self._rank, "abort", -signal.SIGABRT, time.time(), words="called std::terminate")
            self._report(ending, resolve(mark_main_thread()))
        if self._terminate:
            ctypes.CFUNCTYPE(None)(self._terminate)()
        os.abort()
