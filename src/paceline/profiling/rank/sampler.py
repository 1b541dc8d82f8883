"""Samples the main thread while steps are recorded: its line and module, and its waiting for a core.

A garbage collection holds Python's lock, so that no sample falls into it. Its line is noted by gc's callback,
which runs in the thread that collects.

The samples name the line at which a late rank was. On a machine with too few cores, ranks are late by chance,
so the time for which the thread could run and had no core is sampled too. A sample costs Python's lock for
some microseconds, so the thread measures itself and sleeps long enough to stay below `_SHARE` of the time in
which the main thread does not wait for a core. By the clock alone, a rank with a tenth of a core would be
sampled ten times as often per step.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from paceline.own_code import PACKAGE, is_own

_LEAST_S = 0.005
# The main thread loses about 1.5 times as much again, by waking up and cold caches (measured in CPU time of
# recorded steps with and without samples).
_SHARE = 0.003
_MANY_FRAMES = 200
# Collections of younger objects take some 10 us, and would fill the recording.
_LEAST_GENERATION = 1
# Stacks inside of this package that are not a recipe's code.
_RECORDING = f"{PACKAGE}/profiling/", f"{PACKAGE}/torch_seams/"

Place = tuple[str, int, str, str]
_Key = tuple[str, int, str, int]


def choose_pause(spent_s: float, waited_ns: int) -> float:
    """Return the seconds until the next sample.

    Args:
        spent_s: what the last sample cost.
        waited_ns: for how long the main thread has waited for a core since the sample before it.
    """
    return max(_LEAST_S, spent_s / _SHARE + waited_ns / 1e9)


class LineSampler:
    """A thread that notes where the thread that creates it is.

    Attributes:
        samples: the instant in nanoseconds since 1970 and the number of the place of each sample.
        scheduling: instants, and for how long the thread had then run and waited for a core.
        collections: begin, end and number of the place of each garbage collection; known after `end`.
    """

    def __init__(self, torch: Any) -> None:
        self._module_class = torch.nn.Module
        self._watched = threading.get_ident()
        self._ended = threading.Event()
        self._places: dict[_Key, int] = {}
        self._classes: dict[int, str] = {}
        self.samples: list[tuple[int, int]] = []
        self.scheduling: list[tuple[int, int, int]] = []
        self.collections: list[tuple[int, int, int]] = []
        # Not numbered yet: only one thread may number places.
        self._collected: list[tuple[int, int, _Key]] = []
        self._collecting: tuple[int, _Key] | None = None
        self._counters = -1
        with suppress(OSError):
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._counters = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="paceline-lines", daemon=True)
        self._thread.start()
        gc.callbacks.append(self._collect)

    def end(self) -> None:
        """Take no further sample."""
        with suppress(ValueError):
            gc.callbacks.remove(self._collect)
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        if self._counters >= 0 and not self._thread.is_alive():
            os.close(self._counters)
            self._counters = -1
        for begin_ns, end_ns, key in self._collected:
            self.collections.append((begin_ns, end_ns, self._places.setdefault(key, len(self._places))))
        self._collected = []

    def note_scheduling(self) -> None:
        """Note for how long the thread has run, and waited for a core while others used all of them."""
        if self._counters >= 0:
            with suppress(OSError, IndexError, ValueError):
                counters = os.pread(self._counters, 64, 0).split()
                self.scheduling.append((time.time_ns(), int(counters[0]), int(counters[1])))

    def name_places(self, names: Mapping[int, str]) -> list[Place]:
        """Return file, line, function and module of each place.

        Args:
            names: of modules by id; others are named by their class.
        """
        return [
            (path, line, function, names.get(module) or self._classes.get(module, ""))
            for path, line, function, module in self._places
        ]

    def _run(self) -> None:
        # Of this thread alone, waking up included: waiting for Python's lock costs the script nothing.
        pause, before, waited_ns = _LEAST_S, time.thread_time(), 0
        while not self._ended.wait(pause):
            frame = sys._current_frames().get(self._watched)
            if frame is None:
                return
            self._note(frame, time.time_ns())
            self.note_scheduling()
            del frame  # It holds the thread's local variables.
            now = time.thread_time()
            until_ns = self.scheduling[-1][2] if self.scheduling else 0
            since_ns = until_ns - waited_ns if waited_ns else 0
            pause, before, waited_ns = choose_pause(now - before, since_ns), now, until_ns

    def _note(self, innermost: FrameType, now_ns: int) -> None:
        key = self._find(innermost)
        if key is not None:
            self.samples.append((now_ns, self._places.setdefault(key, len(self._places))))

    def _collect(self, moment: str, info: dict[str, int]) -> None:
        if info["generation"] < _LEAST_GENERATION or threading.get_ident() != self._watched:
            return
        if moment == "start":
            self._collecting = None
            with suppress(Exception):  # modules whose attributes fail; gc would print the error
                key = self._find(sys._getframe(1))
                if key is not None:
                    self._collecting = time.time_ns(), key
        elif self._collecting is not None:
            begin_ns, key = self._collecting
            self._collected.append((begin_ns, time.time_ns(), key))
            self._collecting = None

    def _find(self, innermost: FrameType) -> _Key | None:
        """Return the innermost line of the user's code, of the package if there is none, and the module."""
        module, ours = 0, None
        frame: FrameType | None = innermost
        for _ in range(_MANY_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            if not module and code.co_name == "forward":
                module = self._read_module(frame)
            place = code.co_filename, frame.f_lineno, code.co_name
            if is_own(place[0]):
                return *place, module or self._find_module(frame)
            if ours is None and place[0].startswith(PACKAGE) and not place[0].startswith(_RECORDING):
                ours = place
            frame = frame.f_back
        return None if ours is None else (*ours, module)

    def _find_module(self, frame: FrameType | None) -> int:
        """Return the module whose forward calls a frame, for a function of the user's that it calls."""
        for _ in range(_MANY_FRAMES):
            if frame is None:
                return 0
            if frame.f_code.co_name == "forward" and (found := self._read_module(frame)):
                return found
            frame = frame.f_back
        return 0

    def _read_module(self, frame: FrameType) -> int:
        found = frame.f_locals.get("self")
        if not isinstance(found, self._module_class):
            return 0
        self._classes[id(found)] = type(found).__name__
        return id(found)
