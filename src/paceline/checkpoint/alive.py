"""Finds the pending saves whose writer is alive, from file locks, which a dead process cannot hold.

A save that writers make together has a folder `.saving-step-...` beside its temporary one, and in it a file
`alive-00003` per writer, which that writer holds locked while it works. The kernel releases the lock when the
process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.checkpoint import files
from paceline.checkpoint.names import SAVING, TMP

_ALIVE = "alive-"


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


def hold(path: Path, run: str | None) -> IO[bytes]:
    """Make a writer's file and lock it until the stream is closed or this process ends."""
    files.make_file(path)
    stream = open(path, "r+b")  # noqa: SIM115 (held until the writer leaves)
    with suppress(OSError):  # a file system without locks
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    stream.write(json.dumps({"run": run}).encode())
    stream.flush()
    return stream


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
