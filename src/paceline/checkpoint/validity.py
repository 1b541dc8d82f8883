"""Verifies that a checkpoint on disk is unchanged since it was written."""

from __future__ import annotations

import stat
from collections.abc import Collection
from itertools import islice
from pathlib import Path

from paceline.checkpoint.folder_names import step_of
from paceline.checkpoint.hashed import hash_file
from paceline.checkpoint.manifest import (
    FILE_NAME,
    FORMAT_VERSION,
    BadManifestError,
    Manifest,
    OtherFormatError,
    read_manifest,
)
from paceline.errors import PacelineError
from paceline.finding import Finding

# A file that is not part of the checkpoint and does not harm it.
EXTRA_FILE = "PL505"
OTHER_FORMAT = "PL504"
_UNCHANGED = "A checkpoint is used only if all of its files are as they were written."
# Broken files that are reported one by one; a manifest may name a million.
_MOST_FILES = 100
_FALL_BACK = "Remove it or move it away; loading then falls back to the checkpoint before it."


def verify(path: Path, *, read_all: bool = True) -> list[Finding]:
    """Return every problem of one checkpoint; nothing is written.

    Args:
        read_all: hash every file, at the cost of reading the whole checkpoint. Without it only the
            manifest's own hash and the sizes of the files are checked.

    Returns:
        PL500 missing file, PL501 wrong size, PL502 wrong hash, PL503 unreadable manifest, PL504 another
        format, PL505 an extra file, PL506 files that do not match each other. Only PL505 leaves it usable
        (`is_usable`).
    """
    try:
        manifest = read_manifest(path)
    except OtherFormatError as other:
        return [_other(path, other.version)]
    except BadManifestError as bad:
        rule = "Without its manifest, nothing in a checkpoint can be trusted."
        return [Finding("PL503", str(path / FILE_NAME), f"{FILE_NAME} {bad}.", rule, _FALL_BACK)]
    checked = (_check_file(path, manifest, name, read_all=read_all) for name in manifest.files)
    findings = list(islice((finding for finding in checked if finding is not None), _MOST_FILES))
    if len(findings) == _MOST_FILES:
        saw = f"{_MOST_FILES} files are not as written; files after these were not checked."
        findings.append(Finding("PL500", str(path), saw, _UNCHANGED, _FALL_BACK))
    step = step_of(path)
    if step is not None and step != manifest.step:
        findings.append(_unfit(path, f"the folder's name says step {step}, its manifest {manifest.step}."))
    if read_all and not findings:
        findings = check_loads(path) or check_values(path, manifest.files)
    findings += _extra_files(path, {*manifest.files, FILE_NAME})
    return findings


def check_hash(path: Path, manifest: Manifest, name: str) -> Finding | None:
    """Return what is wrong with one file of a checkpoint, which is read: PL500, PL501 or PL502."""
    return _check_file(path, manifest, name, read_all=True)


def check_fits(path: Path) -> list[Finding]:
    """Return PL506 for files that do not fit together, from structures and headers alone."""
    from paceline.checkpoint.content import check_files  # needs torch, and the rest of this module does not

    try:
        return [_unfit(path / name, f"{name} {saw}.") for name, saw in check_files(path)]
    except Exception as error:  # whatever the reason, what cannot be read cannot be loaded
        return [_unfit(path, f"it cannot be read ({type(error).__name__}: {error}).")]


def check_loads(path: Path) -> list[Finding]:
    """Return PL506 for a checkpoint that could not be loaded, by loading all of it but the tensors."""
    if problems := check_fits(path):
        return problems
    from paceline.checkpoint.load import list_trained

    try:
        list_trained(path)
    except PacelineError as error:
        return [_unfit(path, error.saw)]
    except Exception as error:
        return [_unfit(path, f"its state cannot be loaded ({type(error).__name__}: {error}).")]
    return []


def check_values(path: Path, names: Collection[str]) -> list[Finding]:
    """Return PL506 for weights that are not a number, for a checkpoint that loads."""
    from paceline.checkpoint.content import find_nan_in
    from paceline.checkpoint.load import list_trained

    try:
        trained = list_trained(path)
        found = [(name, find_nan_in(path / name, trained)) for name in names]
    except Exception as error:  # another process changes it meanwhile
        return [_unfit(path, f"it cannot be read ({type(error).__name__}: {error}).")]
    return [
        _unfit(path / name, f"{weight} has values that are no numbers.") for name, weight in found if weight
    ]


def is_usable(findings: list[Finding]) -> bool:
    """Return whether a checkpoint with these findings can be loaded."""
    return all(finding.code == EXTRA_FILE for finding in findings)


def refuse_other_format(findings: list[Finding]) -> None:
    """Raise PL504 if it is among the findings."""
    for finding in findings:
        if finding.code == OTHER_FORMAT:
            # Not skipped like a broken one: continuing from an older step would discard work.
            saw = f"{finding.where}: {finding.saw}"
            raise PacelineError(finding.code, saw=saw, rule=finding.rule, fix=finding.fix)


def _check_file(path: Path, manifest: Manifest, name: str, *, read_all: bool) -> Finding | None:
    file, record = path / name, manifest.files[name]
    try:
        status = file.lstat()
        num_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            code, found = "PL500", f"{name} is not a plain file."
        elif num_bytes != record.num_bytes:
            code, found = "PL501", f"{name} has {num_bytes} bytes, the manifest has {record.num_bytes}."
        elif read_all and hash_file(file).sha256 != record.sha256:
            code, found = "PL502", f"{name} was altered: its hash is not the one in the manifest."
        else:
            return None
    except FileNotFoundError:
        code, found = "PL500", f"{name} is missing."
    except OSError as error:
        code, found = "PL500", f"{name} cannot be read ({error.strerror})."
    return Finding(code, str(file), found, _UNCHANGED, _FALL_BACK)


def _other(path: Path, version: int) -> Finding:
    return Finding(
        OTHER_FORMAT,
        str(path / FILE_NAME),
        f"the checkpoint is of format version {version}.",
        f"This Paceline reads version {FORMAT_VERSION}.",
        "Use a Paceline that reads it (for a newer one: pip install -U paceline), or another folder.",
    )


def _unfit(where: Path, saw: str) -> Finding:
    return Finding("PL506", str(where), saw, "The files of a checkpoint must match each other.", _FALL_BACK)


def _extra_files(path: Path, known: set[str]) -> list[Finding]:
    try:
        entries = sorted(path.iterdir())
    except OSError:  # A running run has removed it meanwhile.
        entries = []
    return [
        Finding(
            EXTRA_FILE,
            str(entry),
            f"{entry.name} is not in the manifest.",
            "It is not part of the checkpoint: nothing reads it, and it is deleted with the checkpoint.",
            "Move it elsewhere if you need it.",
        )
        for entry in entries
        if entry.name not in known
    ]
