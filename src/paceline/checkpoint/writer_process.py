"""Starts a rank's writer (`writer.py`), and exchanges messages with it."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from paceline.checkpoint.joint import Order, Outcome
from paceline.errors import PacelineError

# Begins the command line after the program, so that launchers know a writer and let it finish
# (`launching/processes/family.py`).
MARKER = "paceline.checkpoint.writer"
# Which module's `main` is the writer. Tests put faults into it.
PROGRAM = "paceline.checkpoint.writer"
_CODE = (
    "import sys; sys.path[:] = eval(sys.argv[3]); from importlib import import_module; "
    "import_module(sys.argv[2]).main()"
)


class WriterProcess:
    """A rank's writer, from the rank's side.

    It is a new program, not a fork of this process: a fork would have locks that threads hold, and none of
    CUDA's state.

    Args:
        memory: descriptor of the memory that both share.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, memory: int) -> None:
        self._link, its = socket.socketpair()
        command = [sys.executable, "-c", _CODE, MARKER, PROGRAM, repr(sys.path)]
        fds = (its.fileno(), memory)
        with its:
            self._process = subprocess.Popen(
                [*command, *map(str, fds), str(os.getpid())],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._received = b""

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def begin(self, order: Order) -> None:
        """Begin a save."""
        self._send({"do": "begin", "order": asdict(order)})

    def end_copy(self, error: PacelineError | None) -> None:
        """Hand over the copy, or end the save because of an error."""
        if error is None:
            self._send({"do": "write"})
        else:
            self._send({"do": "abandon", "error": [error.code, error.saw, error.rule, error.fix]})

    def read_outcome(self, timeout_s: float | None) -> tuple[Outcome, float] | None:
        """Return the outcome of the save and how long the writer took, or `None` if it is not known in time.

        Raises:
            EOFError: the writer has ended.
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
        table: Any = json.loads(line)
        return Outcome.parse(table), float(table["seconds"])

    def close(self, timeout_s: float = 5.0) -> None:
        """Let it finish and end; it finishes by itself if that takes longer."""
        self._link.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # else Popen warns about it when it is collected

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it has ended: `read_outcome` reports that
            self._link.sendall(json.dumps(message).encode() + b"\n")

    def _describe_end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            return f"signal {-code}" if code < 0 else f"exit code {code}"
        return "it closed its connection"
