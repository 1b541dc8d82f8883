"""Finds the pending saves whose writer is alive, from file locks, which a dead process cannot hold.

A save that writers make together has a folder `.saving-step-...` beside its temporary one, and in it a file
`alive-00003` per writer, which that writer holds locked while it works. The kernel releases the lock when the
process ends, however it ends.

Some file systems show locks only on the node that took them (NFS with nolock, Lustre with localflock), or
have none. So the writer also rewrites its file every few seconds. Another one compares what it reads with
what it read before, by its own clock: times of files are those of other machines.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from paceline.checkpoint import files
from paceline.checkpoint.names import SAVING, TMP

_ALIVE = "alive-"
_BEAT_S = 2.0


@dataclass(frozen=True)
class LiveSave:
    """A save under way.

    Attributes:
        folder: the folder with its writers' records.
        run: id of the run that it belongs to, or `None` if it cannot be read.
    """

    folder: Path
    run: str | None

    @property
    def temporary(self) -> str:
        """Name of the folder with the checkpoint's files."""
        return TMP + self.folder.name.removeprefix(SAVING)


def alive_name(writer: int) -> str:
    """Return the name of the file that a writer holds locked."""
    return f"{_ALIVE}{writer:05d}"


class Hold:
    """A writer's file, locked and rewritten until it is closed or this process ends.

    Args:
        path: of the file.
        run: id of the run.
        on_beat: called after each rewrite that has reached the disk.
    """

    def __init__(self, path: Path, run: str | None, on_beat: Callable[[], None] = lambda: None) -> None:
        files.make_file(path)
        self._stream = open(path, "r+b")  # noqa: SIM115 (held until the writer leaves)
        self._sign = {"run": run, "host": socket.gethostname(), "locks": False}
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._sign["locks"] = True
        self._closing = threading.Event()
        self._on_beat = on_beat
        self._rewrite(0)
        self._thread = threading.Thread(target=self._beat, name="paceline-alive", daemon=True)
        self._thread.start()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        self._closing.set()
        self._thread.join()
        self._stream.close()

    def _beat(self) -> None:
        for number in count(1):
            if self._closing.wait(_BEAT_S):
                return
            with suppress(OSError):
                self._rewrite(number)
                self._on_beat()

    def _rewrite(self, number: int) -> None:
        os.pwrite(self._stream.fileno(), json.dumps(self._sign | {"beat": f"{number:012d}"}).encode(), 0)
        os.fsync(self._stream.fileno())


def read_sign(path: Path) -> bytes:
    """Return what a writer has last written into its file, b"" if nothing."""
    with suppress(OSError):
        return path.read_bytes()
    return b""


def shares_locks(sign: bytes) -> bool:
    """Return whether a writer's lock is known to be seen here, because it is on this host."""
    with suppress(ValueError, AttributeError):
        table = json.loads(sign)
        return bool(table.get("locks")) and table.get("host") == socket.gethostname()
    return False


def is_held(path: Path) -> bool | None:
    """Return whether another process holds a writer's file; `None` if there is no such file.

    A process must not ask this about its own file: closing any descriptor of a file releases its locks.
    """
    try:
        with open(path, "rb") as stream:
            os.lockf(stream.fileno(), os.F_TEST, 0)
    except (BlockingIOError, PermissionError):
        return True
    except FileNotFoundError:
        return None
    except OSError:  # a file system without locks
        return False
    return False


def find_live(folder: Path, own: Path | None = None) -> Iterator[LiveSave]:
    """Yield the saves in a `checkpoints` folder that have a living writer.

    Args:
        folder: with the checkpoints.
        own: the `.saving-...` folder of this process, which is left out.
    """
    for saving in sorted(folder.glob(f"{SAVING}*")):
        if saving == own:
            continue
        held = [path for path in sorted(saving.glob(f"{_ALIVE}*")) if is_held(path)]
        if held:
            yield LiveSave(saving, _read_run(held[0]))


def _read_run(path: Path) -> str | None:
    with suppress(OSError, ValueError, AttributeError):
        run = json.loads(path.read_bytes()).get("run")
        return run if isinstance(run, str) else None
    return None
