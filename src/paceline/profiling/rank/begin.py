"""Starts a recorder, and the watcher if there is one, in a rank before its script's first line.

The launcher has written the settings into its folder, beside the watcher's socket. numpy and torch are not
imported here: the script may be one that never does.
"""

from __future__ import annotations

import importlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.launching.rank.import_hook import when_imported
from paceline.launching.watcher import NoteError, ignore_error
from paceline.profiling.rank.recorder import RecordSettings, StepRecorder
from paceline.torch_seams.watching import BUFFER_SIZES

SETTINGS = "profile.json"
# The entries of torch's Flight Recorder: those of some steps of FSDP over 80 layers.
BUFFER_SIZE = "8000"


class RecordedRank:
    """A rank that is recorded, and possibly watched.

    Args:
        recorder: of this rank.
        note_error: the watcher's.
    """

    def __init__(self, recorder: StepRecorder, note_error: NoteError) -> None:
        self._recorder = recorder
        self._note_error = note_error

    def note_error(self, error: BaseException) -> None:
        """Write the trace of a script that ends by an exception, and pass it on."""
        with suppress(Exception):
            self._recorder.finish()
        self._note_error(error)


def begin(rank: int, socket_path: str, stacks_path: str) -> RecordedRank:
    """Start recorder and watcher; see `launching.watcher.Watcher.entry`."""
    settings: dict[str, Any] = json.loads((Path(socket_path).parent / SETTINGS).read_text(encoding="utf-8"))
    if not any(name in os.environ for name in BUFFER_SIZES):
        os.environ[BUFFER_SIZES[0]] = BUFFER_SIZE
    note_error: NoteError = ignore_error
    watch = settings.pop("watch")
    if watch:
        module, _, function = watch.partition(":")
        enter = getattr(importlib.import_module(module), function)
        note_error = enter(rank, socket_path, stacks_path).note_error
    recorder = StepRecorder(rank, RecordSettings(**settings))
    when_imported("torch", recorder.install)
    return RecordedRank(recorder, note_error)
