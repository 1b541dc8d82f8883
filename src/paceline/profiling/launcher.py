"""The launcher's part of a recording: hands the settings to the ranks, beside the watcher."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launching.watcher import WatchedRank, Watcher, WatchMessage
from paceline.profiling.rank.begin import SETTINGS
from paceline.profiling.rank.recorder import RecordSettings

PATTERN = "rank-*.json"
FAILURES = "rank-*.failed"
# Of recordings that are repeated; see `RecordSettings.every`.
_FOLDERS = "step-*"


def prepare_folder(path: Path) -> Path:
    """Return the absolute path of a new or empty folder for traces.

    Raises:
        PacelineError: PL906 if it cannot be made, or has traces.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        found = sorted((*path.glob(PATTERN), *path.glob(FAILURES), *path.glob(_FOLDERS)))
    except OSError as error:
        raise _folder_error(path, f"cannot be made: {error.strerror}") from None
    if found:
        raise _folder_error(path, f"already has {found[0].name}")
    return path.resolve()


def list_recordings(path: Path) -> list[Path]:
    """Return the folders with traces of the recordings in a folder, in order."""
    folders = [path, *sorted(path.glob(_FOLDERS))]
    return [folder for folder in folders if any(folder.glob(PATTERN))]


def _folder_error(path: Path, reason: str) -> PacelineError:
    return PacelineError(
        "PL906",
        saw=f"the folder {path} {reason}.",
        rule="Each rank writes its trace there, and a mix of two recordings would be misread.",
        fix="Name a new folder with write permission.",
    )


class RecordingWatcher:
    """A watcher that has each rank recorded or timed, and leaves all else to another watcher.

    Args:
        settings: what to record; the folder exists.
        inner: watches the ranks; `None` if nothing does.
        entry: what ranks call; see `launching.watcher.Watcher`.
        file: name of the settings in the launcher's folder, where `entry` looks for them.
    """

    def __init__(
        self,
        settings: RecordSettings | Mapping[str, Any],
        inner: Watcher | None,
        entry: str = "paceline.profiling.rank.begin:begin",
        file: str = SETTINGS,
    ) -> None:
        self.entry = entry
        self._settings = settings if isinstance(settings, Mapping) else asdict(settings)
        self._inner = inner
        self._file = file

    @property
    def final_message(self) -> WatchMessage | None:
        """The inner watcher's verdict."""
        return None if self._inner is None else self._inner.final_message

    @property
    def other_places(self) -> str:
        """The places of the other ranks, as the inner watcher has them."""
        return "" if self._inner is None else self._inner.other_places

    def begin(self, folder: Path, list_ranks: Callable[[], Sequence[WatchedRank]]) -> None:
        """Leave the settings for the ranks, and start to watch."""
        watch = "" if self._inner is None else self._inner.entry
        table = {**self._settings, "watch": watch}
        (folder / self._file).write_text(json.dumps(table), encoding="utf-8")
        if self._inner is not None:
            self._inner.begin(folder, list_ranks)

    def meet(self, node: int, num_nodes: int, host: str, port: int, attempt: int) -> None:
        """Prepare the inner watcher for ranks that are about to start."""
        if self._inner is not None:
            self._inner.meet(node, num_nodes, host, port, attempt)

    def note_failure(self, rank: int, status: int) -> None:
        """Record that a rank has failed."""
        if self._inner is not None:
            self._inner.note_failure(rank, status)

    def note_loss(self) -> None:
        if self._inner is not None:
            self._inner.note_loss()

    def explain_failure(self, died: str = "") -> WatchMessage | None:
        """Return the inner watcher's explanation."""
        return None if self._inner is None else self._inner.explain_failure(died)

    def end(self) -> None:
        """Stop watching."""
        if self._inner is not None:
            self._inner.end()
