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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.hashed import FileRecord
from paceline.reading import read_file

FILE_NAME = "manifest.json"
# Version 2 added the content "sharded". What version 1 can hold is still written as version 1.
FORMAT_VERSION = 2
_FULL_SINCE = 1
_ZEROS = "0" * 64
_SEAL = re.compile(rb'"manifest_sha256": "([0-9a-f]{64})"')


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint's files.

    Attributes:
        step: the optimizer step after which it was taken.
        files: name to size and hash, of every other file.
        identity: what could change the run's last bits: versions, device, threads (`identity.py`).
        content: how the tensors are stored (`content/`): `"full"` or `"sharded"`.
    """

    step: int
    files: dict[str, FileRecord]
    identity: dict[str, Any]
    content: str = "full"


class BadManifestError(Exception):
    """The error of a manifest that is missing, altered or not a manifest."""


class NewerFormatError(Exception):
    """The error of a manifest that is whole but has a newer format version.

    Attributes:
        version: that version.
    """

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


def dump_manifest(manifest: Manifest, *, format_version: int | None = None) -> bytes:
    """Return the bytes of `manifest.json`.

    Args:
        manifest: to write.
        format_version: default the oldest that has the content.
    """
    if format_version is None:
        format_version = _FULL_SINCE if manifest.content == "full" else FORMAT_VERSION
    table = {
        "format_version": format_version,
        "step": manifest.step,
        "content": manifest.content,
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
        NewerFormatError: for a whole manifest of a newer version.
    """
    try:
        text = read_file(folder / FILE_NAME)
    except FileNotFoundError:
        raise BadManifestError("is missing") from None
    except OSError as error:
        raise BadManifestError(f"cannot be read ({error.strerror})") from None
    version = re.search(rb'"format_version": (\d+)', text)
    seals = _SEAL.findall(text)
    if len(seals) != 1 or hashlib.sha256(_seal(text, _ZEROS)).hexdigest().encode() != seals[0]:
        newer = version is not None and int(version[1]) > FORMAT_VERSION
        raise BadManifestError(
            "was altered: its bytes do not have the hash that it states"
            + (f" (and it states format version {int(version[1])})" if newer and version else "")
        )
    try:
        table = json.loads(text)
        if table["format_version"] > FORMAT_VERSION:
            raise NewerFormatError(table["format_version"])
        for name in table["files"]:
            if Path(name).name != name or name == FILE_NAME:
                raise ValueError(f"{name!r} cannot be a file of it")
        return Manifest(
            step=int(table["step"]),
            files={name: FileRecord(**record) for name, record in table["files"].items()},
            identity=dict(table["identity"]),
            content=str(table["content"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadManifestError(f"is not a manifest ({type(error).__name__}: {error})") from None
