"""Copies what rank 0 writes to the terminal and to its log: `tee.py LOG READ_FD:WRITE_FD ...`.

Runs as a process of its own with the standard library only, until all writers have closed, so that
the last words of a rank that crashes are kept. The log gets no control sequences, and of a line that
is drawn over and over (a progress bar) the last state only.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import sys

_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>78]")


def _plain(line: bytes) -> bytes:
    text = _CONTROL.sub(b"", line.rstrip(b"\r"))
    return text.rsplit(b"\r", 1)[-1]


def _write(fd: int, data: bytes) -> bool:
    """Writes everything; False where nobody reads there any more."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return False
    return True


def copy(log: int, pairs: list[tuple[int, int]]) -> None:
    """Copies until the end of every input."""
    inputs = selectors.DefaultSelector()
    rest = {read: b"" for read, _ in pairs}
    for read, write in pairs:
        inputs.register(read, selectors.EVENT_READ, write)
    while inputs.get_map():
        for key, _ in inputs.select():
            try:
                data = os.read(key.fd, 65536)
            except OSError:  # how the end of a pseudo-terminal shows
                data = b""
            if data:
                _write(key.data, data)
                *lines, last = (rest[key.fd] + data).split(b"\n")
                # A bar that is redrawn for hours never ends its line: only its last state is kept.
                rest[key.fd] = last.rsplit(b"\r", 1)[-1] if len(last) > 65536 else last
                for line in lines:
                    _write(log, _plain(line) + b"\n")
            else:
                inputs.unregister(key.fd)
                if rest[key.fd]:
                    _write(log, _plain(rest[key.fd]) + b"\n")


def main() -> None:
    """Reads the arguments and copies; signals meant for the rank don't end the copying."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    pairs = [pair.split(":") for pair in sys.argv[2:]]
    copy(log, [(int(read), int(write)) for read, write in pairs])


if __name__ == "__main__":
    main()
