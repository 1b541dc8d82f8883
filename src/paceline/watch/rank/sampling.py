"""Samples a rank's main thread a few times a second: its place in the code, and whether it waits.

The launcher names a slow rank by these samples. The watching thread takes them at random instants, because
regular ones could fall on the same line of every step. A sample stands for the time since the previous one,
so code that holds Python's lock for seconds counts in full.

A rank waits for others in two cases: its innermost frames are torch's collectives; or they are autograd's
engine, DDP, FSDP or a `.wait()`, and the thread is asleep (at the end of backward, DDP waits in C++). With a
GPU it does not wait in collectives but for the device: in `.item()`, `.cpu()` or `synchronize()`. A thread
asleep in backward means nothing there, because other threads compute.
"""

from __future__ import annotations

import linecache
import os
import random
import re
import sys
import threading
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType

from paceline.watch.protocol.report import Frame, Pace, PlaceTime
from paceline.watch.protocol.words import own_frames
from paceline.watch.rank.threads import Mark, resolve

# Seconds between two samples. A sample takes about 0.35 ms of CPU, most of it for waking up with cold caches.
EVERY_S = 0.25
# An interval is between half and one and a half times that.
_SPREAD = 0.5
# The frames of a stack that are kept: of libraries at its inner end, and the user's.
_MANY_INNERMOST = 8
_MANY_OWN = 12
_MANY_FRAMES = 200
# Resolved frames that are cached.
_MANY_RESOLVED = 2000

# A file whose functions wait for other ranks.
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
# Files of torch in which a sleeping thread waits for other ranks.
_WAITS_ASLEEP = re.compile(
    r"torch/(distributed/(?!checkpoint/|elastic/|launcher/|rpc/)|nn/parallel/distributed\.py$)"
)
_ENGINE = "torch/autograd/graph.py"
# Methods of works and streams, and those of tensors that copy numbers from a GPU to Python.
_WAIT = re.compile("wait")
_WAITS_FOR_DEVICE = re.compile("_?(item|cpu|tolist|numpy|synchronize|wait)")
_CALLED = re.compile(r"\.(\w+)\(")
_STDLIB = os.path.dirname(threading.__file__) + os.sep


@dataclass
class _Tally:
    """The time for which the thread was at one place.

    Attributes:
        marks: the shortened stack; kept, because the ids of its code objects are the key.
        is_waiting: whether it waits for other ranks there.
        seconds: since the previous beat.
    """

    marks: tuple[Mark, ...]
    is_waiting: bool
    seconds: float = 0.0


class Sampler:
    """A sampler of this process's main thread; used by the watching thread alone.

    Args:
        now_s: from a monotonic clock, as all times here.
    """

    def __init__(self, now_s: float) -> None:
        # A separate generator, because the script's random numbers must not depend on us.
        self._random = random.Random()
        self._before_s: float | None = None
        self._samples = 0
        self._tallies: dict[tuple[bool, tuple[tuple[int, int], ...]], _Tally] = {}
        self._resolved: dict[tuple[int, int], tuple[Mark, Frame | None]] = {}
        self.next_s = self._draw(now_s)

    def take(self, now_s: float) -> None:
        """Take a sample of the main thread."""
        self.next_s = self._draw(now_s)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        before_s, self._before_s = self._before_s, now_s
        if frame is None or before_s is None:
            return
        marks, is_waiting = _read(frame)
        del frame  # It holds the thread's local variables.
        # The same line of backward computes at one time and waits at another.
        key = (is_waiting, tuple((id(code), at) for code, at in marks))
        tally = self._tallies.setdefault(key, _Tally(marks, is_waiting))
        tally.seconds += now_s - before_s
        self._samples += 1

    def skip(self, now_s: float) -> None:
        """Discard the time until now, because there is no rank to wait for."""
        self.next_s = self._draw(now_s)
        self._before_s = now_s

    def drain(self) -> Pace | None:
        """Return what was sampled since the last call, or `None` for nothing."""
        samples, tallies = self._samples, list(self._tallies.values())
        self._samples, self._tallies = 0, {}
        if not samples:
            return None
        places = tuple(
            PlaceTime(round(tally.seconds, 4), tally.is_waiting, self._resolve(tally.marks))
            for tally in tallies
        )
        return Pace(samples, places)

    def _draw(self, now_s: float) -> float:
        return now_s + EVERY_S * self._random.uniform(1 - _SPREAD, 1 + _SPREAD)

    def _resolve(self, marks: tuple[Mark, ...]) -> tuple[Frame, ...]:
        if len(self._resolved) > _MANY_RESOLVED:
            self._resolved.clear()
        frames = []
        for mark in marks:
            key = (id(mark[0]), mark[1])
            # Kept together with the mark: its id is unique only as long as it lives.
            if key not in self._resolved:
                self._resolved[key] = mark, next(iter(resolve((mark,))), None)
            frame = self._resolved[key][1]
            if frame is not None:
                frames.append(frame)
        return tuple(frames)


def _read(frame: FrameType) -> tuple[tuple[Mark, ...], bool]:
    """Return the shortened stack of a thread, innermost first, and whether it waits for other ranks."""
    inner: list[Mark] = []
    at: FrameType | None = frame
    while at is not None and not _is_users(at.f_code.co_filename) and len(inner) < _MANY_FRAMES:
        inner.append((at.f_code, at.f_lasti))
        at = at.f_back
    own: list[Mark] = []
    run: list[Mark] = []
    num_own = 0
    while at is not None and num_own < _MANY_OWN and len(run) < _MANY_FRAMES:
        mark = (at.f_code, at.f_lasti)
        if _is_users(at.f_code.co_filename):
            # Keep the library's frame between two of the user's that the user called.
            own += [*run[-1:], mark]
            run = []
            num_own += 1
        else:
            run.append(mark)
        at = at.f_back
    is_waiting = _is_waiting(inner, frame)
    if len(inner) > _MANY_INNERMOST:
        inner = [*inner[: _MANY_INNERMOST - 1], inner[-1]]
    return (*inner, *own), is_waiting


@lru_cache(maxsize=4096)
def _is_users(path: str) -> bool:
    return bool(own_frames((Frame(path, 0, ""),)))


@lru_cache(maxsize=4096)
def _is_of_python(path: str) -> bool:
    return path.startswith(_STDLIB) and "-packages" not in path


def _is_waiting(inner: list[Mark], frame: FrameType) -> bool:
    if any(code.co_filename.endswith(_COLLECTIVES) for code, _ in inner):
        return True
    code = frame.f_code
    if _uses_gpu():
        return _calls(frame, _WAITS_FOR_DEVICE)
    is_engine = code.co_filename.endswith(_ENGINE) and code.co_name == "_engine_run_backward"
    may_wait = is_engine or any(_WAITS_ASLEEP.search(code.co_filename) for code, _ in inner)
    return (may_wait or _calls(frame, _WAIT)) and _is_asleep()


def _calls(frame: FrameType, methods: re.Pattern[str]) -> bool:
    """Return whether a frame's line, outside of Python's library, calls a C method with such a name.

    A method in Python would have the innermost frame itself.
    """
    code = frame.f_code
    if not any(map(methods.fullmatch, code.co_names)) or _is_of_python(code.co_filename):
        return False
    text = linecache.getline(code.co_filename, frame.f_lineno or 0)
    return any(methods.fullmatch(name) for name in _CALLED.findall(text))


def _uses_gpu() -> bool:
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def _is_asleep() -> bool:
    """Return whether the main thread is asleep, because it waits for something."""
    # Its number is the process's; `threading` has a wrong one after a fork.
    file = os.open(f"/proc/self/task/{os.getpid()}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # The state follows the name, which may contain parentheses itself.
        return os.read(file, 512).rpartition(b") ")[2].startswith(b"S")
    finally:
        os.close(file)
