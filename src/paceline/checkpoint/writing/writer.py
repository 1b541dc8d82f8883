"""The writer: a process beside each rank that hashes and writes what the rank has copied, and outlives it.

`writer_process.py` starts it. It is a Python of its own without torch, in a session of its own, so that no
signal to the rank's group reaches it. It shares two things with its rank: memory without a name
(`memfd_create`), which is gone with the last process that has it open; and a socket for these lines of JSON:

    rank to writer    {"do": "begin", "order": {...}}    all ranks have agreed on this save
                      {"do": "write", "digests": [...]}  the copy is complete: from here on, it is committed
                      {"do": "abandon", "error": [...]}  the copy failed
    writer to rank    {"begun": ...}                     a new start sees from now on that this writer works
                      {"beat": ...}                      the disk answers, and what the writer does
                      {"path": ..., "error": ..., "seconds": ...}

If the rank ends before "write", the writer ends the save. If it ends later, the writer finishes the save and
then leaves. Nothing here waits for the rank, and nothing is a collective.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from paceline.checkpoint import files
from paceline.checkpoint.same_copies import Digests
from paceline.checkpoint.writing.joint import JointSave, Order, Outcome
from paceline.errors import PacelineError

# A fraction of a processor if training uses all of them, and enough to finish while it goes on.
_NICENESS = 10
_LOOK_S = 0.5


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


class Writer:
    """The loop of the process.

    Args:
        link: to the rank.
        memory: descriptor of the shared memory.
    """

    def __init__(self, link: RankLink, memory: int) -> None:
        self._link = link
        self._memory = memory
        self._buffer = memoryview(bytearray(files.CHUNK_BYTES))
        self._save: JointSave | None = None
        self._order: Order | None = None
        self._error: PacelineError | None = None

    def serve(self) -> None:
        """Work until the rank has ended and what it had copied is committed."""
        while (message := self._link.receive()) is not None:
            if message["do"] == "begin":
                self._begin(Order(**message["order"]))
            elif message["do"] == "write":
                self._finish(None, message["digests"])
            else:
                code, saw, rule, fix = message["error"]
                self._finish(PacelineError(code, saw=saw, rule=rule, fix=fix))
        if self._save is not None:
            assert self._order is not None
            self._finish(_unfinished_error(self._order))

    def _begin(self, order: Order) -> None:
        save = JointSave(order, lambda: self._link.send_soon({"beat": save.doing}))
        self._order, self._save, self._error = order, save, None
        try:
            self._save.begin()
        except PacelineError as error:
            self._error = error
        self._link.send({"begun": self._error is None})

    def _finish(self, error: PacelineError | None, digests: Sequence[Digests] = ()) -> None:
        """Write and conclude a save, or end it because of an error."""
        assert self._save is not None
        assert self._order is not None
        save, begin_s = self._save, time.monotonic()
        error = self._error or error
        try:
            if error is None:
                save.write(self._read, digests)
                outcome = save.conclude()
            else:
                outcome = save.fail(error)
        except PacelineError as failed:
            outcome = save.fail(_with_rank(failed, self._order))
        except Exception as failed:
            outcome = save.fail(_broken_error(failed, self._order))
        save.leave(outcome)
        self._save = None
        self._reply(outcome, time.monotonic() - begin_s)

    def _reply(self, outcome: Outcome, seconds: float) -> None:
        self._link.send(outcome.dump() | {"seconds": seconds})

    def _read(self, start: int, num_bytes: int) -> Iterator[memoryview]:
        """Yield bytes of the shared memory."""
        end = start + num_bytes
        while start < end:
            part = self._buffer[: min(len(self._buffer), end - start)]
            num_read = os.preadv(self._memory, [part], start)
            if not num_read:
                raise EOFError(f"the shared memory ends at byte {start}")
            yield part[:num_read]
            start += num_read


def main() -> None:
    """Run the writer; the last words of the command line are its descriptors and the rank's process."""
    link, memory, rank_pid = (int(word) for word in sys.argv[-3:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    Writer(RankLink(socket.socket(fileno=link), rank_pid), memory).serve()


def _with_rank(error: PacelineError, order: Order) -> PacelineError:
    if len(order.writers) == 1:
        return error
    saw = f"{error.saw} (rank {order.writer} on {socket.gethostname()})"
    return PacelineError(error.code, saw=saw, rule=error.rule, fix=error.fix)


def _unfinished_error(order: Order) -> PacelineError:
    return PacelineError(
        "PL541",
        saw=f"Rank {order.writer} ended before its share of step {order.step} was copied.",
        rule="A checkpoint is committed once the shares of all ranks are copied; earlier checkpoints are "
        "unchanged.",
        fix="Find out why the rank ended. The run continues from the checkpoint before.",
    )


def _broken_error(error: Exception, order: Order) -> PacelineError:
    return PacelineError(
        "PL542",
        saw=f"The writer of rank {order.writer} failed at step {order.step} "
        f"({type(error).__name__}: {error}).",
        rule="A writer converts every error of the disk; this is another one. Earlier checkpoints are "
        "unchanged.",
        fix="Report it with this message. With checkpoint.asynchronous = false, ranks write their shares "
        "themselves.",
    )


if __name__ == "__main__":
    main()
