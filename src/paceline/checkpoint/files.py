"""The few file operations on which checkpoints are built.

Everything that changes the disk goes through here, so that one place defines what "durable" means and one
place can make it fail. A process may be killed between any two of these operations, and between any two bytes
of a write; `folder.py` orders them so that this is harmless.

`inject` installs a fault hook below them: it is called before each operation and may raise `OSError`, let
only some bytes of a write pass, or end the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Protocol

Operation = Literal["make", "write", "fsync", "rename", "remove"]

# Large enough for the disk, small enough that hashing and writing it stay within the processor's cache.
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class FileWork:
    """An operation that a thread has begun.

    Attributes:
        operation: what it does.
        path: to which file or folder.
        num_bytes: that it syncs.
    """

    operation: str
    path: Path
    num_bytes: int


class FaultHook(Protocol):
    """A hook that is called before every operation that changes the disk."""

    def __call__(self, operation: Operation, path: Path, start: int, num_bytes: int) -> int | None:
        """Decide whether and how far an operation happens.

        Args:
            operation: what is about to happen.
            path: to which file or folder (of a rename: the old name).
            start: of a write, the position in the file; of an fsync, the size of it; otherwise 0.
            num_bytes: of a write, how many bytes; otherwise 0.

        Returns:
            Of a write, how many bytes may be written before asking again (at least 1); `None` for all.

        Raises:
            OSError: the operation fails with it.
        """


_hook: FaultHook | None = None
# By thread, the operation that it began last.
_latest: dict[int, FileWork] = {}


@contextlib.contextmanager
def inject(hook: FaultHook) -> Iterator[None]:
    """Install `hook` below every operation of this process while the block runs."""
    global _hook
    before, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = before


def note(operation: str, path: Path, num_bytes: int = 0) -> None:
    """Note that this thread begins an operation, for `read_activity`."""
    _latest[threading.get_ident()] = FileWork(operation, path, num_bytes)


def read_activity(thread: int | None) -> FileWork | None:
    """Return the operation that a thread began last; one that goes on stays the same object."""
    return _latest.get(thread or 0)


def _ask(operation: Operation, path: Path, start: int = 0, num_bytes: int = 0) -> int:
    note(operation, path, start if operation == "fsync" else 0)
    allowed = _hook(operation, path, start, num_bytes) if _hook is not None else None
    return num_bytes if allowed is None else allowed


class DurableFile:
    """A new file that is on the disk once the `with` block is left without an error.

    Raises:
        FileExistsError: on entering, where the file exists.
        OSError: the error of the file system.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._stream: IO[bytes] | None = None

    def __enter__(self) -> DurableFile:
        _ask("make", self.path)
        self._stream = open(self.path, "xb", buffering=0)
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Write all of `data` (a view of single bytes), in chunks."""
        assert self._stream is not None
        view = memoryview(data)
        assert view.itemsize == 1
        while view:
            chunk = view[:CHUNK_BYTES]
            chunk = chunk[: _ask("write", self.path, self._position, len(chunk))]
            written = self._stream.write(chunk)
            assert written, "a raw write of a blocking file writes at least one byte or raises"
            self._position += written
            view = view[written:]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stream is not None
        with self._stream:
            if kind is None:
                _ask("fsync", self.path, self._position)
                os.fsync(self._stream.fileno())


def make_folder(path: Path) -> None:
    """Make a folder, and those above it; existing ones stay. Each new name is durable on return."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        _ask("make", folder)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def make_new_file(path: Path) -> None:
    """Make an empty file, failing with `FileExistsError` if it exists; durable on return."""
    _ask("make", path)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    _ask("fsync", path)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(old: Path, new: Path) -> None:
    """Rename within one folder, atomically; durable after `sync_folder` of it.

    A folder at `new` makes it fail with `OSError` unless it is empty; a file there is replaced.
    """
    assert old.parent == new.parent
    _ask("rename", old)
    os.rename(old, new)


def link(old: Path, new: Path) -> None:
    """Give a file a second name in its folder, failing with `FileExistsError` if that is taken."""
    assert old.parent == new.parent
    _ask("rename", old)
    os.link(old, new)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, one operation per file."""
    if path.is_dir() and not path.is_symlink():
        for entry in sorted(path.iterdir()):
            remove(entry)
        _ask("remove", path)
        path.rmdir()
    else:
        _ask("remove", path)
        path.unlink()


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the file system of `path`."""
    return shutil.disk_usage(path).free


class BusyError(Exception):
    """The error that another process or thread holds the lock."""


@contextlib.contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Hold a lock file while the block runs; the kernel releases it when the process ends.

    Yields `True` if the lock is held, and `False` on a file system without locks. It uses record locks
    (`lockf`) rather than `flock`, because a forked loader worker that outlives a killed rank would inherit
    the latter and keep holding it.

    Raises:
        BusyError: another process holds it.
        OSError: the lock file cannot be made.
    """
    _ask("make", path)
    with open(path, "ab") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise BusyError(str(path)) from None
        except OSError:  # ENOLCK, ENOTSUP, ENOSYS: some network file systems
            yield False
            return
        yield True
