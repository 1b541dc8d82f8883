"""Files that are hashed while they are written, and the records of their sizes and hashes.

This module needs no torch, so that a process without torch can write and commit checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import files


@dataclass(frozen=True)
class FileRecord:
    """The size and hash of one file, as a manifest lists them.

    Attributes:
        sha256: hash of its bytes, in hex.
    """

    num_bytes: int
    sha256: str


class HashedFile:
    """A new durable file that hashes what is written to it; `record` is available after the block."""

    def __init__(self, path: Path) -> None:
        self._file = files.DurableFile(path)
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def __enter__(self) -> HashedFile:
        self._file.__enter__()
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Write and hash all of `data`."""
        self._file.write(data)
        self._hash.update(data)
        self._num_bytes += len(data)

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    @property
    def record(self) -> FileRecord:
        """Size and hash of what was written."""
        return FileRecord(self._num_bytes, self._hash.hexdigest())


def hash_file(path: Path) -> FileRecord:
    """Return the size and hash of a file, read in chunks."""
    digest, num_bytes = hashlib.sha256(), 0
    for chunk in _chunks(path):
        digest.update(chunk)
        num_bytes += len(chunk)
    return FileRecord(num_bytes, digest.hexdigest())


def _chunks(path: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(files.CHUNK_BYTES))
    with open(path, "rb", buffering=0) as stream:
        while num_bytes := stream.readinto(buffer):
            files.note("read", path)
            yield buffer[:num_bytes]
