"""Starts a rank's writer (`writer.py`), and exchanges messages with it."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from paceline.checkpoint.same_copies import Digests
from paceline.checkpoint.writing.joint import STILL_S, Order, Outcome
from paceline.errors import PacelineError

# Begins the command line after the program, so that launchers know a writer and let it finish
# (`launching/processes/family.py`).
MARKER = "paceline.checkpoint.writing.writer"
# Which module's `main` is the writer. Tests put faults into it.
PROGRAM = "paceline.checkpoint.writing.writer"
# What the new process runs.
_CODE = (
    "import sys; sys.path[:] = eval(sys.argv[3]); from importlib import import_module; "
    "import_module(sys.argv[2]).main()"
)
# How often a wait looks for how long the writer has been silent.
_LOOK_S = 0.5
# How long to wait for a last word of a silent one: two beats.
_LAST_S = 5.0


class StandsStillError(Exception):
    """The error of a writer that does not answer."""


class WriterProcess:
    """A rank's writer, from the rank's side; the two exchange lines of JSON.

    It is a new program, not a fork of the rank: a fork would have locks that threads hold, and none of CUDA's
    state. It is a Python without torch in a session of its own, so that no signal to the rank's group reaches
    it.

    Args:
        memory: descriptor of the memory that both share.

    Raises:
        OSError: it cannot be started.

    Attributes:
        doing: what the writer does, as it last said.
        heard_s: when it last said something.
    """

    def __init__(self, memory: int) -> None:
        self._link, its = socket.socketpair()
        with its:
            numbers = map(str, (its.fileno(), memory, os.getpid()))
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, MARKER, PROGRAM, repr(sys.path), *numbers],
                pass_fds=(its.fileno(), memory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._received = b""
        self._link.settimeout(STILL_S)
        self.doing, self.heard_s = "", time.monotonic()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def begin(self, order: Order) -> None:
        """Begin a save."""
        self.doing, self.heard_s = f"beginning to save step {order.step} in {order.folder}", time.monotonic()
        self._send({"do": "begin", "order": asdict(order)})

    def await_begin(self, limit_s: Callable[[], float] = lambda: STILL_S) -> None:
        """Return once the writer has begun the save, or cannot; call it once per save, before `end_copy`."""
        with suppress(EOFError, StandsStillError):  # `read_outcome` reports it
            self._await(None, limit_s)

    def end_copy(self, error: PacelineError | None, digests: list[Digests]) -> None:
        """Hand over the copy and digests of what other ranks hold too, or end the save by an error."""
        if error is None:
            self._send({"do": "write", "digests": digests})
        else:
            self._send({"do": "abandon", "error": [error.code, error.saw, error.rule, error.fix]})

    def read_outcome(
        self, timeout_s: float | None, limit_s: Callable[[], float] = lambda: STILL_S
    ) -> tuple[Outcome, float] | None:
        """Return the outcome of the save and how long the writer took, or `None` if it is not known in time.

        Args:
            timeout_s: how long to wait for it.
            limit_s: returns how long the writer may be silent.

        Raises:
            EOFError: the writer has ended.
            StandsStillError: it was silent for too long.
        """
        table = self._await(timeout_s, limit_s)
        return None if table is None else (Outcome.parse(table), float(table["seconds"]))

    def _await(self, timeout_s: float | None, limit_s: Callable[[], float]) -> Any:
        """Return the next message that is not a beat, or `None` if that takes longer."""
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            table = self._read(min(_LOOK_S, max(0.0, end_s - time.monotonic())))
            now_s = time.monotonic()
            if table is not None:
                self.heard_s = now_s
                if "beat" not in table:
                    return table
                self.doing = table["beat"]
            elif now_s - self.heard_s > limit_s():
                if not self._has_message(_LAST_S):  # this process, too, may have been stopped until now
                    raise StandsStillError
            elif now_s >= end_s:
                return None

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for the writer to finish. If that takes longer, it finishes on its own."""
        self._link.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # else Popen warns about it when it is collected

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it has ended: `_read` reports that
            self._link.sendall(json.dumps(message).encode() + b"\n")

    def _read(self, timeout_s: float | None) -> Any:
        """Return its next message, or `None` if that takes longer.

        Raises:
            EOFError: it has ended.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            if not select.select([self._link], [], [], left_s)[0]:
                return None
            data = b""
            with suppress(ConnectionError):
                data = self._link.recv(1 << 16)
            if not data:
                raise EOFError(self._describe_end())
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _has_message(self, timeout_s: float) -> bool:
        """Return whether something has arrived, or arrives in time."""
        return b"\n" in self._received or bool(select.select([self._link], [], [], timeout_s)[0])

    def kill(self) -> None:
        """Kill it; one that waits for a disk ends when the disk answers."""
        self._process.kill()
        self._link.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._process.returncode = self._process.returncode or -signal.SIGKILL  # else Popen warns

    def _describe_end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            return f"signal {-code}" if code < 0 else f"exit code {code}"
        return "it closed its connection"
