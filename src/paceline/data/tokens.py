"""Builds and reads token files: a text's ids on disk, built once, read as memory-mapped arrays.

A folder per corpus and tokenizer in the cache folder:

    <key>/train.bin valid.bin   ids, little-endian, in the narrowest of uint8, uint16 and uint32
    <key>/tokenizer.json        for tokenizers other than bytes
    <key>/meta.json             counts, type and a hash of each file

The key is a hash of this format's version, of the files' paths, sizes and times, and of the tokenizer.
Protocol, for any number of processes of any number of runs: a process that finds no valid folder takes the
lock `<key>.lock` (flock, released by the kernel when its holder dies), checks again, builds into
`<key>.<random>.tmp`, syncs it and renames it. So a folder with this name is complete, and the next holder of
the lock removes what a killed build has left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.corpus import CorpusSplit, Piece, unreadable
from paceline.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    fingerprint_tokenizer,
    load_tokenizer,
    train_bpe,
)
from paceline.errors import PacelineError

FORMAT_VERSION = 1
CHUNK_BYTES = 1 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenFile:
    """The ids in a file.

    Attributes:
        dtype: numpy's name of the ids' type.
        num_tokens: how many there are.
        sha256: hash of the file's bytes.
    """

    path: Path
    dtype: str
    num_tokens: int
    sha256: str

    def open(self) -> npt.NDArray[Any]:
        """Return the ids, mapped from the file and read as they are touched."""
        if self.num_tokens == 0:
            return np.empty(0, dtype=self.dtype)  # an empty file cannot be mapped
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.num_tokens,))


@dataclass(frozen=True)
class Corpus:
    """A tokenized text: both splits and the tokenizer."""

    train: TokenFile
    valid: TokenFile
    tokenizer: Tokenizer


def build_corpus(split: CorpusSplit, tokenizer: str, vocab_size: int | None, cache_dir: Path) -> Corpus:
    """Return the token files of a text, from the cache or newly built.

    Any number of processes may call this at once: one builds, the others wait and read.

    Args:
        cache_dir: where token files are kept.
    """
    key = _key(split, fingerprint_tokenizer(tokenizer, vocab_size))
    folder = cache_dir / key
    corpus = _open(folder)
    if corpus is not None:
        return corpus
    with _refused_by_disk(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f"{key}.lock") as alone:
            corpus = _open(folder)
            if corpus is not None:
                return corpus
            if alone:
                for left_over in cache_dir.glob(f"{key}.*.tmp"):
                    shutil.rmtree(left_over)
                if folder.exists():  # damaged: `_open` has refused it
                    shutil.rmtree(folder)
            _build(split, tokenizer, vocab_size, folder)
    corpus = _open(folder)
    assert corpus is not None, f"{folder} was built just now"
    return corpus


def _key(split: CorpusSplit, tokenizer: str) -> str:
    pieces = [
        [
            str(piece.file.path),
            piece.file.name,
            piece.file.size_bytes,
            piece.file.mtime_ns,
            piece.start,
            piece.stop,
        ]
        for piece in (*split.train, *split.valid)
    ]
    text = json.dumps([FORMAT_VERSION, len(split.train), pieces, tokenizer])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def _open(folder: Path) -> Corpus | None:
    """Return the corpus in a folder; None if there is none, or if file sizes differ from `meta.json`."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        definition = None if meta["tokenizer"] is None else (folder / meta["tokenizer"]).read_text("utf-8")
        parts = {
            name: TokenFile(folder / f"{name}.bin", meta["dtype"], part["num_tokens"], part["sha256"])
            for name, part in meta["parts"].items()
        }
        for part in parts.values():
            if part.path.stat().st_size != part.num_tokens * np.dtype(part.dtype).itemsize:
                return None
        tokenizer = ByteTokenizer() if definition is None else FileTokenizer(definition)
        return Corpus(parts["train"], parts["valid"], tokenizer)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock; yield False on a file system without locks, where two builds at once only cost time."""
    with open(path, "ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            yield False
            return
        yield True


@contextlib.contextmanager
def _refused_by_disk(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _NO_SPACE:
            raise PacelineError(
                "PL205",
                saw=f"no space for token files in {cache_dir}: {reason}.",
                rule="The token ids of a corpus are kept there and take about the size of its text.",
                fix="Free space, or set data.cache_dir to a folder on another disk. Partially written files "
                "have been removed.",
            ) from None
        raise PacelineError(
            "PL204",
            saw=f"data.cache_dir={str(cache_dir)!r} cannot be written: {reason}.",
            rule="The token ids of a corpus are kept there between runs.",
            fix="Set data.cache_dir to a folder with write permission.",
        ) from None


def _build(split: CorpusSplit, tokenizer_name: str, vocab_size: int | None, folder: Path) -> None:
    logger.info("building token files in %s", folder)
    building = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        tokenizer = _make_tokenizer(split, tokenizer_name, vocab_size)
        dtype = _narrowest_dtype(tokenizer.vocab_size)
        parts = {}
        for name, pieces in (("train", split.train), ("valid", split.valid)):
            parts[name] = _write_tokens(building / f"{name}.bin", pieces, tokenizer, dtype)
        tokenizer_file = None
        if isinstance(tokenizer, FileTokenizer):
            tokenizer_file = "tokenizer.json"
            _write(building / tokenizer_file, tokenizer.definition)
        meta = {
            "version": FORMAT_VERSION,
            "dtype": dtype,
            "tokenizer": tokenizer_file,
            "parts": {name: asdict(part) for name, part in parts.items()},
        }
        _write(building / "meta.json", json.dumps(meta, indent=1))
        os.chmod(building, 0o755)  # mkdtemp makes folders for one user
        _sync_folder(building)
        try:
            os.rename(building, folder)
        except OSError as error:
            # Without locks another build may have come first; its files are as good.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _make_tokenizer(split: CorpusSplit, name: str, vocab_size: int | None) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if name == "bpe":
        assert vocab_size is not None, "the recipe demands it"
        texts = (chunk.decode(errors="replace") for piece in split.train for chunk in _read(piece))
        return train_bpe(texts, vocab_size)
    return load_tokenizer(Path(name).expanduser())


def _narrowest_dtype(vocab_size: int) -> str:
    return "|u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4"


@dataclass(frozen=True)
class _Part:
    num_tokens: int
    sha256: str


def _write_tokens(path: Path, pieces: Sequence[Piece], tokenizer: Tokenizer, dtype: str) -> _Part:
    """Write the ids of `pieces`, chunk by chunk, a separator between two pieces."""
    digest = hashlib.sha256()
    num_tokens = 0
    with open(path, "wb") as stream:
        for ids in _encode(pieces, tokenizer):
            block = ids.astype(dtype).tobytes()
            stream.write(block)
            digest.update(block)
            num_tokens += len(ids)
        stream.flush()
        os.fsync(stream.fileno())
    return _Part(num_tokens, digest.hexdigest())


def _encode(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Iterator[npt.NDArray[Any]]:
    for number, piece in enumerate(pieces):
        if number > 0 and tokenizer.separator_id is not None:
            yield np.array([tokenizer.separator_id])
        for chunk in _read(piece):
            yield tokenizer.encode_bytes(chunk)


def _read(piece: Piece) -> Iterator[bytes]:
    """Yield the bytes of a piece in chunks of about 1 MiB, cut after a line where there is one.

    The cuts are part of the result: a tokenizer sees one chunk at a time.
    """
    path = piece.file.path
    try:
        with open(path, "rb") as stream:
            stream.seek(piece.start)
            left = piece.stop - piece.start
            rest = b""
            while left > 0:
                chunk = stream.read(min(CHUNK_BYTES, left))
                if not chunk:
                    break
                left -= len(chunk)
                cut = len(chunk) if left == 0 else _find_cut(chunk)
                yield rest + chunk[:cut]
                rest = chunk[cut:]
            if rest:
                yield rest
            status = os.fstat(stream.fileno())
    except OSError as error:
        raise unreadable(path, error) from None
    if left > 0 or (status.st_size, status.st_mtime_ns) != (piece.file.size_bytes, piece.file.mtime_ns):
        raise PacelineError(
            "PL209",
            saw=f"{path} changed while it was read.",
            rule="The text of a run is fixed when it starts.",
            fix="Wait until nothing writes to it, or train on a copy.",
        )


def _find_cut(chunk: bytes) -> int:
    """Return the place after a chunk's last line; without one, before the UTF-8 character that it may
    break."""
    line_end = chunk.rfind(b"\n")
    if line_end >= 0:
        return line_end + 1
    for back in range(1, min(4, len(chunk) - 1) + 1):
        if chunk[-back] & 0xC0 != 0x80:  # the first byte of a character
            return len(chunk) - back if chunk[-back] >= 0xC0 else len(chunk)
    return len(chunk)


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
