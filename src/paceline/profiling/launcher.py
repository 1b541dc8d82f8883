"""The launcher's part of a recording: the folder, and what the ranks are asked for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launching.rank.requests import ENTRY
from paceline.profiling.rank.recorder import RECORD, RecordSettings

PATTERN = "rank-*.json"
FAILURES = "rank-*.failed"


def prepare_folder(path: Path) -> Path:
    """Return the absolute path of a new or empty folder for traces."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        found = sorted((*path.glob(PATTERN), *path.glob(FAILURES)))
    except OSError as error:
        raise _folder_error(path, f"cannot be made: {error.strerror}") from None
    if found:
        raise _folder_error(path, f"already has {found[0].name}")
    return path.resolve()


def _folder_error(path: Path, reason: str) -> PacelineError:
    return PacelineError(
        "PL906",
        saw=f"the folder {path} {reason}.",
        rule="Each rank writes its trace there, and a mix of two recordings would be misread.",
        fix="Name a new folder with write permission.",
    )


def build_request(settings: RecordSettings) -> dict[str, Any]:
    """Return what the launcher asks its ranks for, so that they record; the folder exists."""
    return {ENTRY: RECORD, "settings": asdict(settings)}
