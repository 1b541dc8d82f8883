"""The memory keeper: a process beside each rank that holds the newest states in memory and outlives the rank.

`KeeperProcess` starts it. It is a Python without torch, in a session of its own. It shares two slots of
memory without names (`memfd_create`) with its rank. Lines of JSON go through a socket:

    rank to keeper    {"do": "listen", "address": ...}  receive copies of ranks on another node from now on
                      {"do": "drop", "slot": 0}         the rank is about to write into this slot
                      {"do": "keep", "slot": 0, ...}    the slot is a share of a state: its files, step, ...
                                                        and the keeper on another node that gets a copy
    keeper to rank    {"port": ..., "problem": ""}      it listens
                      {"problem": ""}                   the share is checked and published, and its copy too

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
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from paceline.checkpoint import files
from paceline.checkpoint.companion import CompanionProcess, RankLink
from paceline.checkpoint.memory.sending import CopyKey, CopyReceiver, CopyTarget, send_copy

# Begins the command line after the program, as `writer_process.MARKER` does for writers.
MARKER = "paceline.checkpoint.memory.keeper"
# Name of the index among the keeper's descriptors.
INDEX = "paceline-index"
# In place of a writer: the share of the keeper's own rank.
_OWN = -1
_NICENESS = 10
_LOOK_S = 0.5


class HeldTable:
    """The shares that a keeper holds, its own and copies, and the index that publishes them.

    Args:
        folder: of the run.
        home_pid: process that started the rank, and starts it again.
    """

    def __init__(self, folder: str, home_pid: int) -> None:
        self._folder = folder
        self._home = home_pid, start_time(home_pid)
        self._index = -1
        self._is_final = False
        self._held: dict[CopyKey, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._publish()

    def drop(self, key: CopyKey) -> None:
        """Forget a share."""
        with self._lock:
            if self._held.pop(key, None) is not None:
                self._publish()

    def put(self, key: CopyKey, share: dict[str, Any], fd: int) -> None:
        """Hold a share from now on.

        Args:
            key: its writer and slot; the writer is -1 for this keeper's own rank.
            share: of `held_states.HeldShare`, with the checksums of its files.
            fd: its memory.
        """
        with self._lock:
            self._held[key] = share | {"fd": fd, "is_copy": key[0] != _OWN}
            self._publish()

    def end(self) -> None:
        """Publish that the own rank has ended, so no further share of it follows."""
        with self._lock:
            self._is_final = True
            self._publish()

    def is_wanted(self) -> bool:
        """Return whether the process that starts the rank again is alive."""
        pid, started = self._home
        return start_time(pid) == started != ""

    def _publish(self) -> None:
        """Replace the index by a new one; a reader sees one or the other, whole."""
        table = {
            "folder": self._folder,
            "home": self._home,
            "final": self._is_final,
            "held": [*self._held.values()],
        }
        data = pack_index(table)
        index = os.memfd_create(INDEX, os.MFD_CLOEXEC)
        written = 0
        while written < len(data):
            written += os.write(index, data[written:])
        if self._index >= 0:
            os.close(self._index)
        self._index = index


class MemoryKeeper:
    """The loop of the process.

    Args:
        link: to the rank.
        slots: descriptors of the memory.
        held: what is published.
    """

    def __init__(self, link: RankLink, slots: Sequence[int], held: HeldTable) -> None:
        self._link = link
        self._slots = slots
        self._held = held
        self._receiver: CopyReceiver | None = None

    def serve(self) -> None:
        """Serve requests until no process needs the memory any more."""
        while (message := self._link.receive()) is not None:
            if message["do"] == "leave":
                return
            if message["do"] == "listen":
                self._listen(message["address"], message["secret"])
                continue
            slot = message.pop("slot")
            self._held.drop((_OWN, slot))
            if message.pop("do") == "keep":
                self._keep(slot, message.pop("target"), message)
        self._link.close()
        self._held.end()
        while self._held.is_wanted():
            time.sleep(_LOOK_S)

    def _listen(self, address: str, secret: str) -> None:
        problem = ""
        try:
            self._receiver = CopyReceiver(address, secret, self._held.drop, self._held.put)
        except OSError as error:
            problem = f"{address}: {error.strerror or error}"
        port = 0 if self._receiver is None else self._receiver.port
        self._link.send({"port": port, "problem": problem})

    def _keep(self, slot: int, target: dict[str, Any] | None, share: dict[str, Any]) -> None:
        fd = self._slots[slot]
        share["checksums"] = {name: checksum(fd, start, size) for name, start, size in share["files"]}
        self._held.put((_OWN, slot), share, fd)
        problem = "" if target is None else send_copy(CopyTarget(**target), share, slot, fd)
        self._link.send({"problem": problem})


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
        """Make the keeper drop a slot's state, before the slot is overwritten."""
        self._send({"do": "drop", "slot": slot})

    def listen(self, address: str, secret: str) -> int:
        """Make the keeper receive copies of ranks on another node, and return its port.

        Raises:
            OSError: it cannot listen at this address.
            EOFError: it has ended.
        """
        self._send({"do": "listen", "address": address, "secret": secret})
        found = self._read(None)
        if found["problem"]:
            raise OSError(found["problem"])
        return int(found["port"])

    def keep(self, slot: int, share: dict[str, Any], target: CopyTarget | None) -> None:
        """Make the keeper check and publish a slot's state, and send a copy to another node.

        Args:
            slot: the memory.
            share: of `held_states.HeldShare`.
            target: the keeper that gets the copy.
        """
        self._send({"do": "keep", "slot": slot, "target": None if target is None else target.dump()} | share)

    def read_kept(self, timeout_s: float | None) -> str | None:
        """Return what went wrong with the copy of the next share that it has published, or "".

        It is `None` if the share is not published in time.

        Raises:
            EOFError: it has ended.
        """
        message = self._read(timeout_s)
        return None if message is None else str(message["problem"])

    def leave_behind(self) -> None:
        """Close the connection; it holds its memory for the next start."""
        self._link.close()
        self._process.returncode = 0  # else Popen warns about it when it is collected

    def close(self) -> None:
        """End the keeper, and free its memory."""
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


def pack_index(table: Any) -> bytes:
    """Return an index as bytes: the length and the checksum of a text, then the text."""
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little") + text


def unpack_index(data: bytes) -> Any:
    """Return the index that `pack_index` packed.

    Raises:
        ValueError: it is not yet whole, or was altered.
    """
    text = data[12:]
    if int.from_bytes(data[:8], "little") != len(text) or zlib.crc32(text) != int.from_bytes(
        data[8:12], "little"
    ):
        raise ValueError("the index is not as it was written")
    return json.loads(text)


def start_time(pid: int) -> str:
    """Return the kernel's start time of a process, which distinguishes processes that had the same id.

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
    MemoryKeeper(link, (first, second), HeldTable(folder, home_pid)).serve()


if __name__ == "__main__":
    main()
