"""Lists the files of a text corpus, and holds out a part of it for validation."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError

PYTHON_STDLIB = "python-stdlib"
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class TextFile:
    """One file of the corpus, as it stood when it was listed.

    Attributes:
        path: where it is.
        name: its path relative to the folder that the pattern starts from, with forward slashes.
        mtime_ns: when it was last written.
    """

    path: Path
    name: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `stop` of a file."""

    file: TextFile
    start: int
    stop: int


@dataclass(frozen=True)
class CorpusSplit:
    """The corpus in two parts, each in the order in which it is read."""

    train: list[Piece]
    valid: list[Piece]


def find_text_files(patterns: Sequence[str]) -> list[TextFile]:
    """Return the files that a recipe's `data.files` names, without empty ones.

    The order is that of the paths relative to each pattern's fixed part, so it does not depend on
    the location of the folder; a file that two patterns name counts once.

    Args:
        patterns: paths, globs (`**` matches any depth, `~` is the home folder), a folder's path
            stands for nothing, or `"python-stdlib"`.
    """
    found: dict[Path, TextFile] = {}
    for pattern in patterns:
        num_before = len(found)
        matched = False
        for path, name in _list_stdlib() if pattern == PYTHON_STDLIB else _list_pattern(pattern):
            matched = True
            place = path.resolve()
            if place not in found:
                found[place] = _read_file_state(path, name)
        if not matched:
            raise _no_match(pattern, num_before)
    files = [file for file in found.values() if file.size_bytes > 0]
    if not files:
        raise PacelineError(
            "PL200",
            saw=f"data.files={list(patterns)}: all of the {len(found)} files are empty.",
            rule="Training needs text.",
            fix="Name files that are not empty.",
        )
    return sorted(files, key=lambda file: (file.name, str(file.path)))


def _no_match(pattern: str, num_before: int) -> PacelineError:
    if pattern == PYTHON_STDLIB:
        return PacelineError(
            "PL200",
            saw=f"data.files={pattern!r}: no .py files in {sysconfig.get_path('stdlib')}.",
            rule="It means the running Python's standard library as source text.",
            fix='Name your own text files: files = ["texts/**/*.txt"].',
        )
    where = "" if os.path.isabs(os.path.expanduser(pattern)) else f" in {Path.cwd()}"
    if _find_kind(Path(pattern).expanduser()) == stat.S_IFDIR:
        return PacelineError(
            "PL200",
            saw=f"data.files={pattern!r}{where} is a folder.",
            rule="Files are named by paths and globs.",
            fix=f'For all files in it, use files = ["{pattern.rstrip("/")}/**"].',
        )
    return PacelineError(
        "PL200",
        saw=f"data.files={pattern!r} matches no file{where}.",
        rule="Every path and glob must match at least one file.",
        fix="Check the path; ** matches folders of any depth, as in texts/**/*.txt.",
    )


def _list_stdlib() -> Iterator[tuple[Path, str]]:
    root = sysconfig.get_path("stdlib")
    for folder, folders, names in os.walk(root, onerror=_refuse_listing):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                yield path, path.relative_to(root).as_posix()


def _list_pattern(pattern: str) -> Iterator[tuple[Path, str]]:
    expanded = os.path.expanduser(pattern)
    if _find_kind(Path(expanded)) == stat.S_IFREG:  # also a file whose name has the look of a glob
        yield Path(expanded), Path(expanded).name
        return
    parts = Path(expanded).parts
    num_fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root = Path(*parts[:num_fixed])
    _check_folders(root, parts[num_fixed:])
    for match in glob.iglob(expanded, recursive=True):
        path = Path(match)
        kind = _find_kind(path)
        if kind == stat.S_IFREG:
            yield path, path.relative_to(root).as_posix()
        elif kind != stat.S_IFDIR:
            raise _no_file(pattern, path, kind)
        elif num_fixed < len(parts) and "**" not in parts:
            # `**` goes into the folders that it matches; without it their files would be left out unnoticed.
            raise _no_file(pattern, path, kind)


def _find_kind(path: Path) -> int | None:
    """Return the kind of a file by `stat.S_IFMT`; `None` without one, as behind a broken link."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # No permission, a link to itself, or a name that is too long.
        raise unreadable(path, error) from None


def _check_folders(root: Path, parts: Sequence[str]) -> None:
    """Raise PL201 for a folder that the pattern has to list but cannot, which `glob` skips silently.

    Args:
        root: the part of the pattern before the first wildcard.
    """
    folders = [root]
    for part in parts:
        if part == "**":
            for folder in folders:
                for _, below, _ in os.walk(folder, onerror=_refuse_listing):
                    below[:] = [name for name in below if not name.startswith(".")]
            return
        folders = [entry for folder in folders for entry in _list_folders(folder, part)]


def _list_folders(folder: Path, part: str) -> list[Path]:
    """Return the folders in `folder` that one part of a pattern matches."""
    if not glob.has_magic(part):
        return [folder / part] if _find_kind(folder / part) == stat.S_IFDIR else []
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
            names = [name for name in names if part.startswith(".") or not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []  # Nothing matches there, which PL200 reports.
    except OSError as error:
        raise unreadable(folder, error) from None
    return [folder / name for name in fnmatch.filter(names, part)]


def _refuse_listing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise unreadable(Path(error.filename), error)


def _no_file(pattern: str, path: Path, kind: int | None) -> PacelineError:
    what = {
        None: f"is a symbolic link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "",
        stat.S_IFDIR: "is a folder",
        stat.S_IFIFO: "is a pipe",
        stat.S_IFSOCK: "is a socket",
    }.get(kind, "is a device")
    fix = "Remove it, or choose a pattern that excludes it, such as texts/*.txt."
    if kind == stat.S_IFDIR:
        fix = (
            "Choose a pattern that matches only files, such as texts/*.txt, or texts/** for the files of all "
            "subfolders."
        )
    return PacelineError(
        "PL213",
        saw=f"data.files={pattern!r} matches {path}, which {what or 'has gone'}.",
        rule="Everything that a path or glob matches becomes part of the text, so all of it must be files.",
        fix=fix,
    )


def _read_file_state(path: Path, name: str) -> TextFile:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    return TextFile(path.absolute(), name, status.st_size, status.st_mtime_ns)


def unreadable(path: Path, error: OSError) -> PacelineError:
    """Return PL201 for a file of the corpus."""
    return PacelineError(
        "PL201",
        saw=f"{path} cannot be read: {error.strerror or error}.",
        rule="Every file that data.files matches becomes part of the text.",
        fix="Change its permissions (chmod +r, of a folder +rx), or choose patterns that exclude it.",
    )


def split_files(files: Sequence[TextFile], valid_fraction: float) -> CorpusSplit:
    """Hold out about `valid_fraction` of the text, by size, for validation.

    Files are visited in the order of a hash of their names, so that neither content nor location decides.
    Each one that still fits is held out whole. If more than half of the share is still missing then (one
    file, or a few big ones), the rest is the end of the first file that did not fit, cut after a nearby line
    end if there is one.
    """
    target = int(valid_fraction * sum(file.size_bytes for file in files))
    missing = target
    held_out: set[TextFile] = set()
    too_big: TextFile | None = None
    for file in sorted(files, key=lambda file: _hash_name(file.name)):
        if file.size_bytes <= missing:
            held_out.add(file)
            missing -= file.size_bytes
        elif too_big is None:
            too_big = file
    train: list[Piece] = []
    valid: list[Piece] = []
    for file in files:
        cut = file.size_bytes
        if file in held_out:
            cut = 0
        elif file is too_big and 2 * missing > target:
            cut = _find_cut(file, file.size_bytes - missing)
        if cut > 0:
            train.append(Piece(file, 0, cut))
        if cut < file.size_bytes:
            valid.append(Piece(file, cut, file.size_bytes))
    return CorpusSplit(train, valid)


def _hash_name(name: str) -> bytes:
    # A name is bytes; those that are not UTF-8 are surrogates in it.
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def _find_cut(file: TextFile, at: int) -> int:
    """Return `at`, moved past the next line end nearby, else to the next start of a UTF-8 character."""
    try:
        with open(file.path, "rb") as stream:
            stream.seek(at)
            window = stream.read(4096)
    except OSError as error:
        raise unreadable(file.path, error) from None
    line_end = window.find(b"\n")
    if line_end >= 0 and at + line_end + 1 < file.size_bytes:
        return at + line_end + 1
    for offset, byte in enumerate(window[:4]):
        if byte & 0xC0 != 0x80:  # not the middle of a character
            return at + offset
    return at
