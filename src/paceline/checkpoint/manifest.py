"""`manifest.json`: lists a checkpoint's files, so that later changes are detected.

The manifest is a JSON object in UTF-8. Every version of the format keeps three things, so that an older
Paceline can distinguish "newer" from "broken": the file name; `format_version`; and `manifest_sha256`, the
SHA-256 of the file's own bytes with that value's 64 digits replaced by zeros. So one changed bit anywhere in
a checkpoint is detected, in the manifest too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.hashed import FileRecord
from paceline.reading import read_file

FILE_NAME = "manifest.json"
FORMAT_VERSION = 3
# The names of files that Paceline makes. Nothing else is ever opened, whatever a manifest names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# 100,000 ranks need about 20 MB.
_MOST_BYTES = 32 << 20
_ZEROS = "0" * 64
_SEAL = re.compile(rb'"manifest_sha256": "([0-9a-f]{64})"')


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint's files.

    Attributes:
        step: the optimizer step after which it was taken.
        files: name to size and hash, of every other file.
        identity: what could change the run's last bits: versions, device, threads (`identity.py`).
    """

    step: int
    files: dict[str, FileRecord]
    identity: dict[str, Any]

    def digest(self) -> str:
        """Return a digest by which ranks compare what they see."""
        return hashlib.sha256(dump_manifest(self)).hexdigest()


class BadManifestError(Exception):
    """The error of a manifest that is missing, altered or not a manifest."""


class OtherFormatError(Exception):
    """The error of a manifest that is whole but has another format version.

    Attributes:
        version: that version.
    """

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


def dump_manifest(manifest: Manifest, *, format_version: int = FORMAT_VERSION) -> bytes:
    """Return the bytes of `manifest.json`."""
    table = {
        "format_version": format_version,
        "step": manifest.step,
        "identity": manifest.identity,
        "files": {name: asdict(record) for name, record in sorted(manifest.files.items())},
        "manifest_sha256": _ZEROS,
    }
    text = json.dumps(table, indent=2, allow_nan=False).encode() + b"\n"
    return _seal(text, hashlib.sha256(text).hexdigest())


def _seal(text: bytes, digits: str) -> bytes:
    return _SEAL.sub(f'"manifest_sha256": "{digits}"'.encode(), text)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint's folder; the other files are not read.

    Raises:
        BadManifestError: with what is wrong, as the end of a sentence.
        OtherFormatError: for a whole manifest of another version.
    """
    try:
        if (folder / FILE_NAME).is_symlink():
            raise BadManifestError("is a symbolic link")
        text = read_file(folder / FILE_NAME, _MOST_BYTES)
    except FileNotFoundError:
        raise BadManifestError("is missing") from None
    except OSError as error:
        raise BadManifestError(f"cannot be read ({error.strerror})") from None
    return parse_manifest(text)


def parse_manifest(text: bytes) -> Manifest:
    """Check the bytes of a manifest, wherever they come from.

    Raises:
        BadManifestError: with what is wrong, as the end of a sentence.
        OtherFormatError: for a whole manifest of another version.
    """
    version = re.search(rb'"format_version": (\d{1,9})\b', text)
    seals = _SEAL.findall(text)
    if len(seals) != 1 or hashlib.sha256(_seal(text, _ZEROS)).hexdigest().encode() != seals[0]:
        newer = version is not None and int(version[1]) > FORMAT_VERSION
        raise BadManifestError(
            "was altered: its bytes do not have the hash that it states"
            + (f" (and it states format version {int(version[1])})" if newer and version else "")
        )
    try:
        table = json.loads(text, object_pairs_hook=_refuse_duplicates)
        if table["format_version"] != FORMAT_VERSION:
            raise OtherFormatError(_parse_number(table["format_version"], "the format version"))
        files = {name: _parse_record(name, record) for name, record in table["files"].items()}
        identity = dict(table["identity"])
        if not isinstance(identity.get("run", ""), str):
            raise ValueError(f"the run is {identity['run']!r:.60}")
        _parse_number(identity.get("generation", 0), "the start")
        return Manifest(
            step=_parse_number(table["step"], "the step"),
            files=files,
            identity=identity,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadManifestError(f"is not a valid manifest ({type(error).__name__}: {error})") from None


def _parse_record(name: str, record: Any) -> FileRecord:
    if not _NAME.fullmatch(name) or name == FILE_NAME:
        raise ValueError(f"{name!r} cannot be a file of it")
    parsed = FileRecord(**record)
    _parse_number(parsed.num_bytes, f"the size of {name}")
    if not isinstance(parsed.sha256, str) or not _SHA256.fullmatch(parsed.sha256):
        raise ValueError(f"{parsed.sha256!r} is not the hash of {name}")
    return parsed


def _parse_number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{what} is {value!r}")
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it names {twice!r} twice")
    return found
