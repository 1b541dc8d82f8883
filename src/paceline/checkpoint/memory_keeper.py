"""The memory keeper: a process beside each rank that holds the newest states in memory and outlives the rank.

`KeeperProcess` starts it. It is a Python without torch, in a session of its own. It shares two slots of
memory without names (`memfd_create`) with its rank. Lines of JSON go through a socket:

    rank to keeper    {"do": "drop", "slot": 0}         the rank is about to write into this slot
                      {"do": "keep", "slot": 0, ...}    the slot is a share of a state: its files, step, token
    keeper to rank    {"token": ...}                    the share is checked and published

What it holds is published in one more file without a name, the index (`held_states.py` reads it). If the rank
ends, the keeper goes on holding until the process that started the rank ends, or until it gets SIGTERM. The
kernel frees the memory with the last process that has it open, however these end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from paceline.checkpoint import files
from paceline.checkpoint.companion import CompanionProcess, RankLink

# Begins the command line after the program, as `writer_process.MARKER` does for writers.
MARKER = "paceline.checkpoint.memory_keeper"
# Name of the index among the keeper's descriptors.
INDEX = "paceline-index"
_NICENESS = 10
_LOOK_S = 0.5


class MemoryKeeper:
    """The loop of the process.

    Args:
        link: to the rank.
        slots: descriptors of the memory.
        home_pid: process that started the rank, and starts it again.
        folder: of the run.
    """

    def __init__(self, link: RankLink, slots: Sequence[int], home_pid: int, folder: str) -> None:
        self._link = link
        self._slots = slots
        self._home = home_pid, start_time(home_pid)
        self._folder = folder
        self._index = -1
        self._held: dict[int, dict[str, Any]] = {}
        self._publish(is_final=False)

    def serve(self) -> None:
        """Work until nobody needs the memory any more."""
        while (message := self._link.receive()) is not None:
            if message["do"] == "leave":
                return
            self._held.pop(message["slot"], None)
            if message["do"] == "keep":
                self._keep(message)
            self._publish(is_final=False)
            if message["do"] == "keep":
                self._link.send({"token": message["token"]})
        self._link.close()
        self._publish(is_final=True)
        while self._is_at_home():
            time.sleep(_LOOK_S)

    def _keep(self, message: dict[str, Any]) -> None:
        fd = self._slots[message["slot"]]
        share = {key: value for key, value in message.items() if key not in ("do", "slot")}
        share["fd"] = fd
        share["checksums"] = {name: checksum(fd, start, size) for name, start, size in message["files"]}
        self._held[message["slot"]] = share

    def _publish(self, *, is_final: bool) -> None:
        """Replace the index by a new one; a reader sees one or the other, whole."""
        table = {
            "folder": self._folder,
            "home": self._home,
            "final": is_final,
            "held": [*self._held.values()],
        }
        text = json.dumps(table).encode()
        index = os.memfd_create(INDEX, os.MFD_CLOEXEC)
        # With its length before it, so that a reader notices one that is still being written.
        os.write(index, len(text).to_bytes(8, "little"))
        written = 0
        while written < len(text):
            written += os.write(index, text[written:])
        if self._index >= 0:
            os.close(self._index)
        self._index = index

    def _is_at_home(self) -> bool:
        pid, started = self._home
        return start_time(pid) == started != ""


class KeeperProcess(CompanionProcess):
    """A rank's memory keeper, from the rank's side.

    Args:
        slots: descriptors of the memory.
        home_pid: process that started this rank, and starts it again.
        folder: of the run.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, slots: Sequence[int], home_pid: int, folder: str) -> None:
        super().__init__(MARKER, MARKER, slots, (str(home_pid), folder))

    def drop(self, slot: int) -> None:
        """Let it forget what a slot held, before that is written over."""
        self._send({"do": "drop", "slot": slot})

    def keep(self, slot: int, share: dict[str, Any]) -> None:
        """Let it check and publish what a slot holds; see `held_states.py` for the share."""
        self._send({"do": "keep", "slot": slot} | share)

    def read_kept(self, timeout_s: float | None) -> str | None:
        """Return the token of the next share that it has published, or `None` if that takes longer.

        Raises:
            EOFError: it has ended.
        """
        message = self._read(timeout_s)
        return None if message is None else str(message["token"])

    def close(self) -> None:
        """Let it go, with what it holds."""
        self._send({"do": "leave"})
        self._link.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def checksum(fd: int, start: int, num_bytes: int) -> int:
    """Return the CRC-32 of bytes of a file; it detects any change of up to 32 bits in a row.

    Raises:
        EOFError: the file ends before.
    """
    buffer = memoryview(bytearray(files.CHUNK_BYTES))
    end, found = start + num_bytes, 0
    while start < end:
        num_read = os.preadv(fd, [buffer[: min(len(buffer), end - start)]], start)
        if not num_read:
            raise EOFError(f"the memory ends at byte {start}")
        found = zlib.crc32(buffer[:num_read], found)
        start += num_read
    return found


def start_time(pid: int) -> str:
    """Return when a process started, as the kernel counts, which tells apart processes of one number.

    It is "" for a process that has ended.
    """
    with suppress(OSError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            words = stream.read().rpartition(")")[2].split()
        return "" if words[0] in "ZX" else words[19]
    return ""


def main() -> None:
    """Run the keeper; the last words of the command line are as `KeeperProcess` gives them."""
    *numbers, folder = sys.argv[-6:]
    its, first, second, rank_pid, home_pid = map(int, numbers)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    link = RankLink(socket.socket(fileno=its), rank_pid)
    MemoryKeeper(link, (first, second), home_pid, folder).serve()


if __name__ == "__main__":
    main()
