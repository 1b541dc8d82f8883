"""A process beside a rank that outlives it: how it starts, and the lines of JSON between the two.

It is a new program, not a fork of the rank: a fork would have locks that threads hold, and none of CUDA's
state. It is a Python without torch in a session of its own, so that no signal to the rank's group reaches it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_CODE = (
    "import sys; sys.path[:] = eval(sys.argv[3]); from importlib import import_module; "
    "import_module(sys.argv[2]).main()"
)
_LOOK_S = 0.5


class CompanionProcess:
    """The process, from the rank's side.

    Args:
        marker: begins the command line after the program, so that launchers know the process and spare it
            (`launching/processes/family.py`).
        program: module whose `main` it runs.
        fds: descriptors that it inherits. The last words of its command line are the number of its socket, of
            these, the rank's process and `words`.
        words: further words.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, marker: str, program: str, fds: Sequence[int], words: Sequence[str] = ()) -> None:
        self._link, its = socket.socketpair()
        with its:
            inherited = (its.fileno(), *fds)
            numbers = map(str, (*inherited, os.getpid()))
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, marker, program, repr(sys.path), *numbers, *words],
                pass_fds=inherited,
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


class RankLink:
    """The connection to the rank, from the side of the process beside it.

    Args:
        link: the socket.
        rank_pid: process of the rank.
    """

    def __init__(self, link: socket.socket, rank_pid: int) -> None:
        self._link = link
        self._rank_pid = rank_pid
        self._received = b""
        self._sending = threading.Lock()

    def receive(self) -> dict[str, Any] | None:
        """Return the next message of the rank, or `None` if the rank has ended."""
        while b"\n" not in self._received:
            if select.select([self._link], [], [], _LOOK_S)[0]:
                data = b""
                with suppress(ConnectionError):
                    data = self._link.recv(1 << 16)
                if not data:
                    return None
                self._received += data
            elif os.getppid() != self._rank_pid:  # a child of the rank may hold the other end open
                return None
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the rank, if it still is there."""
        with suppress(OSError), self._sending:
            self._link.sendall(json.dumps(message).encode() + b"\n")

    def send_soon(self, message: dict[str, Any]) -> None:
        """Send a message unless that would wait for the rank."""
        with suppress(OSError, ValueError):
            if select.select([], [self._link], [], 0)[1]:
                self.send(message)

    def close(self) -> None:
        """Close the connection."""
        self._link.close()
