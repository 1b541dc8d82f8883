"""Reads the stack of a rank that cannot answer: a signal makes its interpreter write it into a file.

The handler is `faulthandler`'s. It runs without Python's lock, so it also answers if the main thread holds
that lock in compiled code. Processes that the rank has forked answer too. The rank's watching thread gets the
signal, because it would end a call of the main thread that sleeps (EINTR).
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from paceline.watch.protocol.report import WATCHING_THREAD, Frame

SIGNAL = signal.SIGRTMAX - 3
# How long the handler may take to begin, and between two of its writes: it may wait for a core.
_WRITTEN_S = 2.0
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')


def read_main_stack(pid: int, path: Path) -> tuple[Frame, ...]:
    """Return a process's main-thread stack, innermost frame first; empty if the process does not answer."""
    with suppress(OSError, KeyError):
        return _read(
            pid, int(find_watching_thread(pid).name), path
        )  # Linux prefers the thread of this number
    return ()


def read_worker_stack(pid: int, path: Path) -> tuple[Frame, ...]:
    """Return the main thread's stack of a child that a process has forked, such as a loader's worker."""
    import psutil  # ranks import this file, and nothing else than the standard library before their script

    with suppress(OSError, psutil.Error):
        for child in psutil.Process(pid).children():
            folder = Path(f"/proc/{child.pid}/fd")
            if any(link.exists() and link.samefile(path) for link in folder.iterdir()):
                return _read(child.pid, child.pid, path)
    return ()


def _read(pid: int, thread: int, path: Path) -> tuple[Frame, ...]:
    size = path.stat().st_size
    if not _catches(pid):
        return ()
    os.kill(thread, SIGNAL)
    ends_s = time.monotonic() + _WRITTEN_S
    text = ""
    while time.monotonic() < ends_s and not _is_whole(text):
        time.sleep(0.05)
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            file.seek(size)
            before, text = text, file.read()
        if text != before:
            ends_s = time.monotonic() + _WRITTEN_S
    return parse_main_stack(text)


def find_watching_thread(pid: int) -> Path:
    """Return the folder in /proc of a rank's watching thread, or raise KeyError if it has none."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text(encoding="utf-8", errors="replace").strip() == WATCHING_THREAD:
            return task
    raise KeyError(pid)


def _catches(pid: int) -> bool:
    """Return whether a process has a handler for the signal; without one, the signal would end it."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (SIGNAL - 1) & 1)


def _is_whole(text: str) -> bool:
    """Return whether a main thread's stack is there, to its outermost call or the limit on frames."""
    return text.endswith((" in <module>\n", " in _run_module_as_main\n", "\n  ...\n"))


def parse_main_stack(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames from `faulthandler`'s output, which lists the main thread last."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            frames = []
        elif match := _FRAME.match(line):
            number = int(match["line"]) if match["line"].isdigit() else 0
            frames.append(Frame(match["file"], number, match["function"]))
    return tuple(frames)
