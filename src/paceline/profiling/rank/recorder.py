"""Records some steps of a rank by torch's profiler, without any change to its script.

`STEPS` counts the optimizer's steps. After `after` of them a `Recording` begins. A file appears whole, by one
rename, also if the script ends or is stopped before.

A failure here must not end the script: it is logged, and no trace appears.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.errors import PacelineError
from paceline.launching.rank.import_hook import when_imported
from paceline.memory.steps import STEPS, StepMemory
from paceline.profiling.rank.recording import Recording
from paceline.torch_seams.watching import BUFFER_SIZES

log = logging.getLogger(__name__)

RECORD = "paceline.profiling.rank.recorder:record"
"""Called in each rank; see `launching.rank.requests`."""
# The entries of torch's Flight Recorder: those of some steps of FSDP over 80 layers.
_BUFFER_SIZE = "8000"
# The median of fewer steps before the recording says nothing about its cost.
_LEAST_BEFORE = 3
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RecordSettings:
    """The steps to record, and the folder for them.

    Attributes:
        folder: for the file `rank-NNNN.json`.
        after: optimizer steps before the recording starts, at least 1.
        steps: how many to record, at least 1.
    """

    folder: str
    after: int
    steps: int


class StepRecorder:
    """The recorder of a rank.

    Args:
        rank: global.
        settings: what to record.
        steps: counts from the first step on.

    Attributes:
        is_done: whether it records no more.
        failure: why it recorded nothing; empty if it did not fail.
    """

    def __init__(self, rank: int, settings: RecordSettings, steps: StepMemory = STEPS) -> None:
        self._rank = rank
        self._settings = settings
        self._steps = steps
        self._torch: Any = None
        self._number = 0
        self._last_ns = 0
        self._before: deque[int] = deque(maxlen=16)
        self._recording: Recording | None = None
        self._first = settings.after  # the last step before a recording
        self._signal: Any = None
        self._pid = os.getpid()
        self.is_done = False
        self.failure = ""

    def install(self, torch: Any) -> None:
        """Record from now on, once torch has been imported."""
        self._torch = torch
        self._steps.install(torch)
        self._steps.follow(self._end_step)
        atexit.register(self.finish)
        # A rank that calls a function ends as multiprocessing's processes do, without atexit.
        util: Any = sys.modules.get("multiprocessing.util")  # not imported before the script does
        if util is not None:
            util.Finalize(None, self.finish, exitpriority=0)

    def finish(self) -> None:
        """Write what has been recorded, if anything; later calls do nothing."""
        if self.is_done or os.getpid() != self._pid:
            return
        self.is_done = True
        atexit.unregister(self.finish)
        self._steps.leave(self._end_step)
        if self._recording is not None:
            self._guard(self._write)
        if self._signal is not None:
            with suppress(ValueError):  # another thread than the main one
                signal.signal(signal.SIGTERM, self._signal)

    # ---- counting

    def _end_step(self, number: int) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if self.is_done or not is_main or os.getpid() != self._pid:
            return
        self._number = number
        now, recording = time.time_ns(), self._recording
        if recording is None:
            self._before.append(now - self._last_ns)
            if self._number == self._first:
                self._guard(self._start)
        elif recording.is_complete:
            self.finish()
        elif self._number == self._first + 1:
            self._guard(recording.settle)
        else:
            recording.add(self._number, self._last_ns, now)
        self._last_ns = time.time_ns()

    def _on_forward(self) -> None:
        """End the recording: not in the last optimizer's step, whose span is open until it returns."""
        if self._recording is not None and self._recording.is_complete:
            self.finish()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.is_done = True
            self.failure = f"{type(error).__name__}: {error}"
            log.warning("%s", failure_error(f"rank {self._rank}", self.failure))
            with suppress(OSError):
                path = Path(self._settings.folder) / f"rank-{self._rank}.failed"
                path.write_text(self.failure, encoding="utf-8")
            recording, self._recording = self._recording, None
            if recording is not None:
                recording.abandon()

    # ---- recording

    def _start(self) -> None:
        if self._signal is None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._signal = signal.signal(signal.SIGTERM, self._terminate)
        self._recording = Recording(
            self._torch,
            self._rank,
            self._settings.steps,
            on_forward=self._on_forward,
        )

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.finish()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _write(self) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        recording.write(Path(self._settings.folder), lambda: self._describe(recording.steps))

    def _describe(self, steps: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
        """Return cost and machine, as `kineto.Recorded` reads them."""
        before = list(self._before)[1:]
        slowdown = None
        if len(before) >= _LEAST_BEFORE:
            recorded = statistics.median(end - begin for _, begin, end in steps)
            slowdown = recorded / max(1.0, statistics.median(before))
        return {"slowdown": slowdown, "host": _read_host()}


def record(rank: int, table: dict[str, Any]) -> None:
    """Record what the launcher asks for, once the script imports torch; called before its first line."""
    keep_more_calls()
    when_imported("torch", StepRecorder(rank, RecordSettings(**table["settings"])).install)


def keep_more_calls() -> None:
    """Have torch's Flight Recorder keep the collectives of a recording; call it before the first group."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints its starts and stops below 6
    if not any(name in os.environ for name in BUFFER_SIZES):
        os.environ[BUFFER_SIZES[0]] = _BUFFER_SIZE


def failure_error(rank: str, reason: str) -> PacelineError:
    """Return the error for a rank that could not record: PL924."""
    return PacelineError(
        "PL924",
        saw=f"{rank} records no trace: {reason}.",
        rule="The training goes on without it, and the report is on the other ranks.",
        fix="Remove the cause, and record again.",
    )


def _read_host() -> str:
    """Return what identifies this machine and its start: processes with the same have the same clock."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
