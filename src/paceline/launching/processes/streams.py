"""Opens the streams of a rank's output: pipes (or pseudo-terminals) to the pump's process, or files."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import subprocess
import sys
import termios
import tty
from pathlib import Path

from paceline.launching.processes import pump

_DRY_S = 3.0


class Pump:
    """The pump's process (`pump.py`) and the socket to it. It writes to the streams of this process.

    Attributes:
        lost: the error and the stream (1 or 2) of the first output that a full disk did not take, as far as
            `drain` knows; None if nothing was lost.
    """

    def __init__(self) -> None:
        self.lost: tuple[OSError, int] | None = None
        self._channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            command = [sys.executable, "-I", "-S", str(Path(pump.__file__)), str(its.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[its.fileno()], start_new_session=True)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def has_died(self) -> bool:
        """Return whether it was killed."""
        return self._process.poll() is not None

    def let_go(self) -> None:
        """Close this end of the socket in a fork of the process that started the pump; the pump continues."""
        self._channel.close()
        self._process.returncode = 0  # it is not this process's child, and no reason for a warning

    def copy(self, fd: int, log: str, to: int, *, persists: bool) -> None:
        """Copy everything that is read from `fd` to a log and, unless 0, to this process's stream `to`.

        With `persists`, a terminal that has gone does not end the copying to the log.
        """
        words = json.dumps({"log": log, "to": to, "persists": persists}).encode()
        with contextlib.suppress(OSError):  # it was killed: the rank will notice
            self._channel.sendmsg([words], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])

    def drain(self) -> None:
        """Wait until the ranks' output has been passed on, a few seconds at most."""
        with contextlib.suppress(OSError):
            self._channel.settimeout(_DRY_S)
            self._channel.send(pump.DRAIN)
            _, *lost = self._channel.recv(32).split() or [b""]
            if lost:
                number, to = map(int, lost)
                self.lost = OSError(number, os.strerror(number)), to

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


def open_streams(
    copier: Pump | None, stdout: str, stderr: str, log: str, *, shows: bool, persists: bool
) -> tuple[int, int]:
    """Open a rank's stdout and stderr; the caller closes both.

    Args:
        copier: the pump; None for this process's own stdout and stderr.
        stdout: a file that is cut to nothing first; empty for the terminal.
        log: a file that gets what goes to no file of its own.
        shows: whether that is written to the terminal too.
        persists: see `Pump.copy`.

    Raises:
        OSError: a file cannot be opened.
    """
    opened: list[int] = []
    try:
        for fd, path in ((1, stdout), (2, stderr)):
            if path and path != os.devnull:
                opened.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))
            elif copier is None:
                opened.append(os.dup(fd))
            else:
                to = fd if shows and not path else 0
                source, target = _pipe_like(to)
                opened.append(target)
                copier.copy(source, log, to, persists=persists)
                os.close(source)
    except OSError:
        for target in opened:
            os.close(target)
        raise
    return opened[0], opened[1]


def _pipe_like(target: int) -> tuple[int, int]:
    """Open a pipe for `target`, or a pseudo-terminal of its size if `target` is a terminal."""
    if not target or not os.isatty(target):
        return os.pipe()
    source, end = os.openpty()
    tty.setraw(end)  # the real terminal does the translating
    termios.tcsetwinsize(end, termios.tcgetwinsize(target))
    return source, end
