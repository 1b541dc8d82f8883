"""The process that copies the ranks' output to the terminal, and to each rank's log.

A rank writes into a pipe, or into a pseudo-terminal where the launcher writes to a terminal, so that progress
bars work. Whole lines reach the terminal, so that ranks do not interleave within a line; an unfinished line
is passed on after a moment. The log gets no control sequences, and only the last state of a line that is
redrawn (a progress bar). It is a process of its own (`pump.py FD`), with the standard library only: it
outlives a crashed rank, so that rank's last output is kept, and a stopped terminal stops only the processes
that write to it.

Protocol, on one socket (`SOCK_SEQPACKET`): a message `{"log": path, "to": 1, 2 or 0, "persists": bool}` with
one file descriptor to read from. The answer to `drain` is `dry` once all output has been passed on, or `dry
ERRNO TO` if a full disk has kept some of it off stdout or stderr. When the socket ends, both launcher and
keeper have gone: after some seconds the pump kills the processes that still write to its pipes, and exits.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import os
import re
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass

_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>78]")
# How long an unfinished line waits for its end, and how long it may get meanwhile.
_PATIENCE_S = 0.05
_MOST_BYTES = 65536
# A child of a rank may hold its pipe open for ever. After this long without output it counts as dry.
_DRY_AFTER_S = 0.2
# How long ranks may take once launcher and keeper have gone; longer than the keeper gives them.
_GRACE_S = 12.0
# The number of a pseudo-terminal (ioctl_tty(2)).
_TIOCGPTN = 0x80045430
DRAIN, DRY = b"drain", b"dry"
# The disk is full, but space may become free: unlike a lost reader, this is no reason to end a rank.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class _Stream:
    log: int
    to: int
    persists: bool
    # Unfinished lines that wait for their end, for the terminal and for the log.
    rest: bytes = b""
    log_rest: bytes = b""
    since_s: float = 0.0


def run_pump(channel: socket.socket) -> None:
    """Copy until the other ends of the channel and of all streams are closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _Pump(channel).run()


class _Pump:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._inputs = selectors.DefaultSelector()
        self._inputs.register(channel, selectors.EVENT_READ, None)
        self._streams: dict[int, _Stream] = {}
        self._is_draining = False
        self._lost = b""  # errno and stream of the first output that could not be written
        self._alone_s: float | None = None
        self._last_s = time.monotonic()

    def run(self) -> None:
        while self._inputs.get_map():
            if self._alone_s is not None and time.monotonic() - self._alone_s > _GRACE_S:
                self._end_writers()
                return
            waiting = any(stream.rest for stream in self._streams.values())
            is_idle = not waiting and not self._is_draining and self._alone_s is None
            ready = self._inputs.select(None if is_idle else _PATIENCE_S)
            for key, _ in ready:
                if key.data is None:
                    self._listen()
                else:
                    self._read(int(key.fd), key.data)
            self._pass_on_old()
            if not self._streams or time.monotonic() - self._last_s > _DRY_AFTER_S:
                self._report_dry()

    def _listen(self) -> None:
        words, ancillary, _, _ = self._channel.recvmsg(4096, socket.CMSG_SPACE(4))
        if not words:
            self._inputs.unregister(self._channel)
            self._alone_s = time.monotonic()
        elif words == DRAIN:
            self._is_draining = True
            self._last_s = time.monotonic()
        else:
            fds = array.array("i")
            fds.frombytes(ancillary[0][2][:4])
            wish = json.loads(words)
            log = os.open(wish["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._streams[fds[0]] = _Stream(log, wish["to"], wish["persists"])
            self._inputs.register(fds[0], selectors.EVENT_READ, self._streams[fds[0]])

    def _report_dry(self) -> None:
        if self._is_draining:
            self._is_draining = False
            with contextlib.suppress(OSError):
                self._channel.send(DRY + self._lost)

    def _read(self, fd: int, stream: _Stream) -> None:
        try:
            data = os.read(fd, _MOST_BYTES)
        except OSError:  # how the end of a pseudo-terminal shows
            data = b""
        self._last_s = time.monotonic()
        if not data:
            self._close(fd, stream)
            return
        self._log(stream, data)
        if not stream.to:
            return
        if not stream.rest:
            stream.since_s = self._last_s
        stream.rest += data
        cut = max(stream.rest.rfind(b"\n"), stream.rest.rfind(b"\r")) + 1
        if len(stream.rest) > _MOST_BYTES:
            cut = len(stream.rest)
        self._write(fd, stream, cut)

    def _end_writers(self) -> None:
        """Kill the processes that hold the other end of a stream; no other process is left that could."""
        names = {_name_of_peer(fd) for fd in self._streams}
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                folder = f"/proc/{entry}/fd"
                if any(os.readlink(f"{folder}/{fd}") in names for fd in os.listdir(folder)):
                    os.kill(int(entry), signal.SIGKILL)

    def _pass_on_old(self) -> None:
        now = time.monotonic()
        for fd, stream in list(self._streams.items()):
            if stream.rest and now - stream.since_s >= _PATIENCE_S:
                self._write(fd, stream, len(stream.rest))

    def _write(self, fd: int, stream: _Stream, num_bytes: int) -> None:
        data, stream.rest = stream.rest[:num_bytes], stream.rest[num_bytes:]
        stream.since_s = time.monotonic()
        try:
            _write_all(stream.to, data)
        except OSError as error:
            if self._is_full(stream, error):
                return
            # The reader of the output has gone.
            stream.rest = b""
            stream.to = 0
            if not stream.persists:  # the rank shall notice, as it would without us
                self._close(fd, stream)

    def _is_full(self, stream: _Stream, error: OSError) -> bool:
        """Return whether output was lost to a full disk, which is reported at the end."""
        if error.errno not in _FULL:
            return False
        self._lost = self._lost or b" %d %d" % (error.errno, stream.to)
        return True

    def _log(self, stream: _Stream, data: bytes) -> None:
        *lines, last = (stream.log_rest + data).split(b"\n")
        # A progress bar that is redrawn for hours never ends its line, so only its last state is kept.
        stream.log_rest = last.rsplit(b"\r", 1)[-1] if len(last) > _MOST_BYTES else last
        with contextlib.suppress(OSError):  # a full disk must not stop the ranks
            _write_all(stream.log, b"".join(_plain(line) + b"\n" for line in lines))

    def _close(self, fd: int, stream: _Stream) -> None:
        if stream.to:
            try:
                _write_all(stream.to, stream.rest)
            except OSError as error:
                self._is_full(stream, error)
        with contextlib.suppress(OSError):
            if stream.log_rest:
                _write_all(stream.log, _plain(stream.log_rest) + b"\n")
        self._inputs.unregister(fd)
        del self._streams[fd]
        os.close(fd)
        os.close(stream.log)


def _name_of_peer(fd: int) -> str:
    """Return the name in /proc of the writing end of a pipe or pseudo-terminal."""
    name = os.readlink(f"/proc/self/fd/{fd}")
    if name.startswith("pipe:"):
        return name
    number = fcntl.ioctl(fd, _TIOCGPTN, b"\0" * 4)
    return f"/dev/pts/{int.from_bytes(number, sys.byteorder)}"


def _plain(line: bytes) -> bytes:
    text = _CONTROL.sub(b"", line.rstrip(b"\r"))
    return text.rsplit(b"\r", 1)[-1]


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    run_pump(socket.socket(fileno=int(sys.argv[1])))
